"""Figures of a study: one for each kind of data that is present."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from mtp_train.evaluation.cells import StudyReport
from mtp_train.report.figures import LOOKS, STUDY_FIGURE_STEM, FigureFile, assign_looks, render_study_figures
from study_samples import BARE, RATES, STUDY

EVERY = ["tau", "marginal_acceptance", "tasks_1", "tasks_2", "tasks_3", "depth", "context", "output_position"]
EVERY += ["costs"]


@pytest.fixture(scope="module")
def full() -> list[FigureFile]:
    """Return the figures of the full study, drawn once."""
    return render_study_figures(STUDY)


def small(depth: int = 3, tasks: tuple[str, ...] = ("all",)) -> StudyReport:
    """Return one setting of one arm."""
    arm = "distilled+retrained"
    cells = tuple(
        cell
        for cell in STUDY.cells
        if (cell.arm, cell.temperature, cell.context_tokens, cell.depth) == (arm, 0.0, None, depth)
        and cell.task in tasks
    )
    return replace(BARE, arms={arm: STUDY.arms[arm]}, cells=cells)


def test_full_study_has_every_figure_on_white(full: list[FigureFile]) -> None:
    assert [figure.stem for figure in full] == EVERY
    for figure in full:
        image = Image.open(io.BytesIO(figure.png)).convert("RGB")
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert len(image.getcolors(maxcolors=1 << 20) or ()) > 10
        assert STUDY_FIGURE_STEM.fullmatch(figure.stem)


def test_figures_without_data_are_left_out() -> None:
    assert render_study_figures(BARE) == []
    assert [figure.stem for figure in render_study_figures(small())] == ["marginal_acceptance", "costs"]


def test_figures_show_the_cells(full: list[FigureFile]) -> None:
    changed = [
        replace(cell, tau=1.2, tau_ci95=(1.1, 1.3), marginal=(0.2,) * cell.depth, speedup=0.4, round_seconds=0.09)
        if cell.arm == "distilled+retrained"
        else cell
        for cell in STUDY.cells
    ]
    figures = render_study_figures(replace(STUDY, cells=tuple(changed)))
    same = [one.stem for one, other in zip(figures, full, strict=True) if one.png == other.png]
    assert same == ["output_position"]


def test_intervals_of_the_positions_are_drawn_where_they_are_given() -> None:
    report = small()
    bare = replace(report, cells=tuple(replace(cell, marginal_ci95=None) for cell in report.cells))
    given, without = render_study_figures(report), render_study_figures(bare)
    assert [one.png == other.png for one, other in zip(given, without, strict=True)] == [False, True]


@pytest.mark.parametrize("name", [r"$\frac$", "x" * 300, "<b>&"], ids=["mathematics", "long", "markup"])
def test_names_of_any_kind_are_drawn(name: str) -> None:
    report = small(tasks=("all", "coding", "math"))
    cells = tuple(replace(cell, arm=name, task=name if cell.task == "math" else cell.task) for cell in report.cells)
    figures = render_study_figures(replace(report, arms={name: STUDY.arms["distilled+retrained"]}, cells=cells))
    assert [figure.stem for figure in figures] == ["marginal_acceptance", "tasks_1", "costs"]
    assert len({Image.open(io.BytesIO(figure.png)).width for figure in figures}) == 1


def test_arms_do_not_share_a_look() -> None:
    looks = assign_looks([*RATES, "graft", "none"])
    assert len(set(looks.values())) == 5
    assert looks["graft"] == LOOKS["graft"]
    assert len(assign_looks([f"arm {number}" for number in range(20)])) == 20
