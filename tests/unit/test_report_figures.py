"""Figures: valid images that contain the given data, one for each kind of data that is present."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from mtp_train.evaluation.results import Report
from mtp_train.report.figures import FigureFile, curves, render_figures
from report_samples import EMPTY, METRICS, PLAIN, RETRAINED, SAMPLE, run_cells
from study_samples import BARE, STUDY

OF_A_RUN = ["tau", "speedup", "marginal_acceptance"]
OF_A_STUDY = [*OF_A_RUN, "depth", "depth_speedup", "context"]


@pytest.fixture(scope="module")
def full() -> list[FigureFile]:
    """Return the figures of the full study, drawn once."""
    return render_figures(STUDY)


def stems(figures: list[FigureFile]) -> list[str]:
    return [figure.stem for figure in figures]


def pixels(figure: FigureFile) -> Image.Image:
    return Image.open(io.BytesIO(figure.png)).convert("RGB")


def only(name: str) -> Report:
    """Return the report of a run with one arm that drafts, under this name."""
    arms = {name: RETRAINED, "none": PLAIN}
    return replace(SAMPLE, arms=arms, cells=run_cells(arms))


def test_every_figure_is_drawn_on_white(full: list[FigureFile]) -> None:
    of_run = render_figures(SAMPLE, METRICS)
    assert stems(full) == OF_A_STUDY
    assert stems(of_run) == [*OF_A_RUN, "loss", "held_out"]
    for figure in (*full, *of_run):
        image = pixels(figure)
        assert image.width > 900
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert len(image.getcolors(maxcolors=1 << 20) or ()) > 10


def test_figures_without_data_are_left_out() -> None:
    assert render_figures(EMPTY) == render_figures(BARE) == []
    unmeasured = replace(SAMPLE, arms={"ceiling": replace(RETRAINED, speedup=None)}, cells=())
    assert stems(render_figures(unmeasured)) == ["tau", "marginal_acceptance"]


def test_figures_show_the_cells(full: list[FigureFile]) -> None:
    figures = {"tau": 1.2, "tau_ci95": (1.1, 1.3), "marginal": (0.2,) * 3, "speedup": 0.4}
    arm = "distilled+retrained"
    changed = [replace(one, **figures, round_seconds=0.09) if one.arm == arm else one for one in STUDY.cells]
    arms = {**STUDY.arms, arm: replace(STUDY.arms[arm], **figures)}
    drawn = render_figures(replace(STUDY, arms=arms, cells=tuple(changed)))
    assert [one.stem for one, other in zip(drawn, full, strict=True) if one.png == other.png] == []


def test_names_of_any_kind_are_drawn() -> None:
    figures = render_figures(only(rf"$\frac$ <b>& {'x' * 300}"))
    assert len(figures) == 3
    assert all(pixels(figure).width == pixels(figures[0]).width for figure in figures)


def test_curves_of_training_skip_what_was_not_measured() -> None:
    found = curves(METRICS, {"loss": "loss", "loss_depth_2": "depth 2", "held_out_tau": "greedy", "absent": "-"})
    assert {one.name: [(x, y) for x, y, _ in one.points] for one in found} == {
        "loss": [(10, 2.5), (20, 1.5), (30, 1.2)],
        "depth 2": [(10, 3.0), (30, 1.9)],
        "greedy": [(10, 1.5), (20, 1.8)],
    }
    assert len({one.look.colour for one in found}) == 3
    # A single logged step has no curve.
    assert stems(render_figures(SAMPLE, METRICS[:2])) == OF_A_RUN
