"""Figures: valid images that contain the given data."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from mtp_train.report.figures import FIGURE_STEMS, FigureFile, curves, render_figures
from report_samples import EMPTY, METRICS, PLAIN, RETRAINED, SAMPLE


def pixels(figure: FigureFile) -> Image.Image:
    return Image.open(io.BytesIO(figure.png)).convert("RGB")


def by_stem(figures: list[FigureFile]) -> dict[str, FigureFile]:
    return {figure.stem: figure for figure in figures}


def test_figures_are_png_with_ink_on_white() -> None:
    figures = render_figures(SAMPLE, {}, METRICS)
    assert tuple(figure.stem for figure in figures) == FIGURE_STEMS
    for figure in figures:
        assert figure.png.startswith(b"\x89PNG\r\n\x1a\n")
        image = pixels(figure)
        assert image.width > 900
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert len(image.getcolors(maxcolors=1 << 20) or ()) > 10


def test_arms_keep_their_colour_in_every_figure() -> None:
    for figure in render_figures(SAMPLE, {}):
        colours = {colour for _, colour in pixels(figure).getcolors(maxcolors=1 << 20) or ()}
        assert (0x00, 0x72, 0xB2) in colours, f"{figure.stem} lost the retrained arm"


def test_intervals_are_drawn_where_they_are_given() -> None:
    without = by_stem(render_figures(SAMPLE, {}))
    given = by_stem(render_figures(SAMPLE, {"retrained": [(0.6, 0.95), None, (0.5, 0.9)]}))
    assert given["marginal_acceptance"].png != without["marginal_acceptance"].png
    assert given["tau"].png == without["tau"].png


def test_figures_without_data_are_left_out() -> None:
    assert render_figures(EMPTY, {}) == []
    silent = replace(PLAIN, tau=None, speedup=None)
    assert render_figures(replace(SAMPLE, arms={"none": silent}), {}) == []
    unmeasured = replace(SAMPLE, arms={"ceiling": replace(RETRAINED, speedup=None)})
    assert [figure.stem for figure in render_figures(unmeasured, {})] == ["tau", "marginal_acceptance"]


@pytest.mark.parametrize("name", [r"$\frac$", "x" * 300, "<b>&"], ids=["mathematics", "long", "markup"])
def test_names_of_any_kind_are_drawn(name: str) -> None:
    figures = render_figures(replace(SAMPLE, arms={name: RETRAINED, "none": PLAIN}), {})
    assert len(figures) == 3
    assert all(pixels(figure).width == pixels(figures[0]).width for figure in figures)


def test_curves_of_training_skip_what_was_not_measured() -> None:
    found = curves(METRICS, {"loss": "loss", "loss_depth_2": "depth 2", "held_out_tau": "greedy", "absent": "-"})
    assert {one.subject.name: [(x, y) for x, y, _ in one.points] for one in found} == {
        "loss": [(10, 2.5), (20, 1.5), (30, 1.2)],
        "depth 2": [(10, 3.0), (30, 1.9)],
        "greedy": [(10, 1.5), (20, 1.8)],
    }
    assert len({one.subject.look.colour for one in found}) == 3


def test_a_single_logged_step_has_no_curve() -> None:
    drawn = [figure.stem for figure in render_figures(SAMPLE, {}, METRICS[:2])]
    assert drawn == ["tau", "marginal_acceptance", "speedup"]
