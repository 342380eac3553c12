"""A study as one HTML file that needs nothing else: slices of the grid, section by section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_train.report.cells import StudyReport
from mtp_train.report.figures import FigureFile
from mtp_train.report.page import arm_rows, embedded, fill, shared_values
from mtp_train.report.study_grids import (
    Grid,
    context_grid,
    depth_grid,
    difference_grid,
    difference_matrix,
    drift_grid,
    task_grid,
    temperature_grid,
)
from mtp_train.report.study_serving import (
    advice_grid,
    advice_matrix,
    advice_of,
    break_even_grid,
    cost_grid,
    latency_grid,
    task_words,
)
from mtp_train.report.study_slices import Slices, slice_report
from mtp_train.report.study_template import STUDY_PAGE, STUDY_STYLE
from mtp_train.report.study_wording import (
    STUDY_GLOSSARY,
    count_real,
    depth_words,
    finding_headline,
    ranked_arms,
    setting_words,
    study_headline,
    study_key_figures,
)
from mtp_train.report.wording import flatten


@dataclass(frozen=True)
class Flags:
    """Engine flags to copy, and what they are for."""

    title: str
    flags: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Section:
    """A heading and what comes under it, in the order of the fields."""

    title: str
    notes: tuple[str, ...] = ()
    arms: Sequence[Mapping[str, Any]] = ()
    figures: Sequence[Mapping[str, str]] = ()
    positions: bool = False
    """Whether to show every arm's figures by position."""
    grids: tuple[Grid, ...] = ()
    flags: tuple[Flags, ...] = ()
    rows: Sequence[tuple[str, str]] = ()

    @property
    def anchor(self) -> str:
        """What a link to the section ends in."""
        return self.title.lower().replace(" ", "-")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show under the heading; notes alone are nothing."""
        return not (self.arms or self.figures or self.positions or self.grids or self.flags or self.rows)


def render_study_page(report: StudyReport, figures: Sequence[FigureFile], provenance: Mapping[str, Any]) -> str:
    """Return the page. Every name, path and reason in it is text: markup in one is shown, not obeyed."""
    slices = slice_report(report)
    shared = shared_values(report, report.title, provenance)
    verdict = study_headline(slices)
    further = [one for one in report.findings if one.statement != verdict.title]
    sections = _sections(slices, {figure.stem: figure for figure in figures}, bool(shared["by_position"]))
    values = {
        "headline": verdict,
        "key_figures": study_key_figures(slices),
        "findings": [finding_headline(one) for one in further],
        "setting_sentence": _setting_sentence(slices),
        "sections": [section for section in sections if not section.is_empty],
        "glossary": STUDY_GLOSSARY,
    }
    return fill(STUDY_PAGE, STUDY_STYLE, shared | values)


def _sections(slices: Slices, figures: Mapping[str, FigureFile], positions: bool) -> list[Section]:
    """Return every section, those without content too."""
    report = slices.report

    def drawn(*stems: str) -> list[dict[str, str]]:
        return embedded(figures[stem] for stem in stems if stem in figures)

    maps = drawn(*(stem for stem in figures if stem.startswith("tasks_")))
    by_task = advice_matrix(slices) if len({row.arm for row in report.advice}) > 1 else None
    return [
        Section("Arms", _trunk_notes(report), arms=_arms(slices), figures=drawn("tau", "marginal_acceptance")),
        Section(
            "Differences", _difference_notes(slices), grids=_given(difference_grid(slices), difference_matrix(slices))
        ),
        Section("What to serve", grids=_given(advice_grid(slices), by_task), flags=_flags(slices)),
        Section("By position in the draft", positions=positions),
        Section("By task", figures=maps, grids=_given(task_grid(slices))),
        Section("By temperature", (_RULE_NOTE,), grids=_given(temperature_grid(slices))),
        Section("By depth", figures=drawn("depth"), grids=_given(depth_grid(slices))),
        Section("By context", figures=drawn("context"), grids=_given(context_grid(slices))),
        Section("Along the output", figures=drawn("output_position")),
        Section("By entropy of the text", figures=drawn("entropy")),
        Section("What it costs", figures=drawn("costs"), grids=_given(cost_grid(slices))),
        Section("Time of a reply", (_LATENCY_NOTE,), grids=_given(latency_grid(slices))),
        Section("From which length on", (_BREAK_EVEN_NOTE,), grids=_given(break_even_grid(slices))),
        Section("While the trunk is fine-tuned", figures=drawn("drift"), grids=_given(drift_grid(slices))),
        Section("The served model", rows=flatten(report.endpoint or {})),
    ]


_RULE_NOTE = "Arms compare within one temperature and rule; which head is better can depend on both."
_LATENCY_NOTE = "Seconds for a whole reply, prefill included, and the speed over plain decoding in brackets."
_BREAK_EVEN_NOTE = (
    "Output length from which drafts make up for what the head costs over the prompt, and the depth that does."
)


def _setting_sentence(slices: Slices) -> str:
    if slices.headline is None:
        return ""
    return (
        f"Unless a table says otherwise: {setting_words(slices.headline)}. "
        f"All {len(slices.report.cells):,} cells of the grid are in acceptance.csv."
    )


def _arms(slices: Slices) -> list[dict[str, Any]]:
    ranked = ranked_arms(slices)
    best = ranked[0][0] if len(ranked) > 1 else None
    rows = []
    for name, arm in slices.report.arms.items():
        rows += arm_rows({name: arm}, "" if arm.measured_here else "recorded", focus=best)
    return rows


def _trunk_notes(report: StudyReport) -> tuple[str, ...]:
    if len({arm.trunk for arm in report.arms.values()}) < 2:
        return ()
    return (
        "These arms have different trunks, which write different texts, and text of low entropy is easier to draft. "
        "Between trunks, the difference in overlap at equal entropy is what says which head is better.",
    )


def _difference_notes(slices: Slices) -> tuple[str, ...]:
    return (
        f"Paired by prompt, over groups of prompts, first arm minus second. {count_real(slices)} of the report's "
        "comparisons are real, at 5 % over all of them together (Holm). Other settings are in comparisons.csv.",
    )


def _flags(slices: Slices) -> tuple[Flags, ...]:
    """Return each set of flags once, with the arm and the tasks that it is for."""
    tasks: dict[tuple[str, int, tuple[tuple[str, str], ...]], list[str]] = {}
    for row in advice_of(slices):
        if row.flags:
            tasks.setdefault((row.arm, row.depth, tuple(row.flags.items())), []).append(task_words(row.task))
    return tuple(
        Flags(f"{arm}, {depth_words(depth)}: {', '.join(dict.fromkeys(names))}", flags)
        for (arm, depth, flags), names in tasks.items()
    )


def _given(*grids: Grid | None) -> tuple[Grid, ...]:
    return tuple(grid for grid in grids if grid is not None)
