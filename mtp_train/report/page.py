"""Render the report of a run or a study as one HTML file without scripts or network, figures included.

The templates and style sheets are in ``templates/``. ``run.html.j2`` and ``study.html.j2`` extend ``page.html.j2``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mtp_train.acceptance.gate import setting_name
from mtp_train.evaluation.cells import StudyReport
from mtp_train.evaluation.results import ArmResult, RunReport
from mtp_train.report.figures import FigureFile
from mtp_train.report.study_grids import (
    Grid,
    context_grid,
    cost_grid,
    depth_grid,
    difference_grid,
    difference_matrix,
    task_grid,
    temperature_grid,
)
from mtp_train.report.study_slices import Slices, slice_report
from mtp_train.report.study_wording import (
    STUDY_GLOSSARY,
    count_real,
    finding_headline,
    ranked_arms,
    serving_sentences,
    setting_words,
    study_headline,
    study_key_figures,
)
from mtp_train.report.wording import (
    COLUMNS,
    DEPTH_COLUMNS,
    GATE_COLUMNS,
    GLOSSARY,
    apart_sentence,
    arm_cells,
    capitalised,
    depth_rows,
    flatten,
    format_number,
    gate_rows,
    group_arms,
    headline,
    held_out_sentence,
    key_figures,
    lossless_sentence,
    power_sentence,
    recorded_sentence,
    serving_sentence,
)


def render_page(report: RunReport, figures: Sequence[FigureFile], provenance: Mapping[str, Any]) -> str:
    """Return the page of a run. Markup in a name, a path or a reason is escaped."""
    groups = group_arms(report)
    trunk = next((arm.trunk for arm in groups.alike.values()), "")
    values = {
        "headline": headline(report),
        "key_figures": key_figures(report),
        "alike": _arm_rows(groups.alike, "", focus="retrained"),
        "apart": _arm_rows(groups.apart, "other trunk"),
        "recorded": _arm_rows(groups.recorded, "recorded"),
        "apart_sentence": apart_sentence(groups, report.settings),
        "recorded_sentence": recorded_sentence(groups),
        "held_out_sentence": held_out_sentence(report.settings),
        "figures": _embedded(figures),
        "served": _served_groups(report),
        "samples": report.samples,
        "serving_sentence": serving_sentence(report),
        "depth_columns": DEPTH_COLUMNS,
        "depth_rows": depth_rows(report),
        "gate": report.gate,
        "gate_columns": GATE_COLUMNS,
        "gate_rows": gate_rows(report.gate),
        "power": power_sentence(report.gate),
        "gate_reason": capitalised(report.gate.reason) if report.gate else "",
        "glossary": GLOSSARY,
    }
    return _fill("run.html.j2", _shared_values(report, trunk, provenance) | values)


def _served_groups(report: RunReport) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (setting, rows for ``arm_table``) of every setting but the first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in report.cells:
        name = setting_name(cell.temperature, cell.top_p, cell.top_k, cell.rule)
        found.setdefault(name, []).extend(_arm_rows({cell.arm: cell}, "", focus="retrained"))
    return list(found.items())


def _fill(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template of the package; every value is escaped."""
    environment = Environment(
        loader=PackageLoader("mtp_train.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def _shared_values(report: RunReport, subject: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template values that pages of runs and studies share."""
    depth = max((len(shares) for arm in report.arms.values() for _, shares in _per_depth(arm)), default=0)
    return {
        "subject": subject,
        "columns": COLUMNS,
        "depth": depth,
        "by_position": _by_position(report, depth),
        "lossless_sentence": lossless_sentence(report.lossless),
        "settings": flatten(report.settings),
        "provenance": flatten(provenance),
    }


def _embedded(figures: Iterable[FigureFile]) -> list[dict[str, str]]:
    """Return figures for the template: captions, and PNG bytes in base64."""
    return [{"caption": figure.caption, "base64": base64.b64encode(figure.png).decode()} for figure in figures]


def _arm_rows(arms: Mapping[str, ArmResult], note: str, focus: str | None = None) -> list[dict[str, Any]]:
    """Return rows for ``arm_table``; the arm named ``focus`` is highlighted."""
    return [
        {
            "name": name,
            "note": note,
            "trunk": arm.trunk,
            "head": arm.head,
            "cells": arm_cells(arm),
            "focus": name == focus,
        }
        for name, arm in arms.items()
    ]


def _per_depth(arm: ArmResult) -> list[tuple[str, Sequence[float | None]]]:
    figures: tuple[tuple[str, Sequence[float | None] | None], ...] = (
        ("marginal", arm.marginal),
        ("conditional", arm.conditional),
        ("dense", arm.dense),
        ("overlap", arm.overlap),
    )
    return [(kind, shares) for kind, shares in figures if shares]


def _by_position(report: RunReport, depth: int) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return (arm, lines) of every arm; a line is the name of a figure and its ``depth`` cells."""
    arms = []
    for name, arm in report.arms.items():
        lines = [
            (kind, [format_number(share, 3) for share in (*shares, *[None] * (depth - len(shares)))])
            for kind, shares in _per_depth(arm)
        ]
        if lines:
            arms.append((name, lines))
    return arms


@dataclass(frozen=True)
class Section:
    """A heading and its content, shown in the order of the fields."""

    title: str
    notes: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    """Sentences that are content of their own."""
    arms: Sequence[Mapping[str, Any]] = ()
    figures: Sequence[Mapping[str, str]] = ()
    positions: bool = False
    """Whether to show the table of figures by position."""
    grids: tuple[Grid, ...] = ()
    rows: Sequence[tuple[str, str]] = ()

    @property
    def anchor(self) -> str:
        """The fragment of a link to the section."""
        return self.title.lower().replace(" ", "-")

    @property
    def is_empty(self) -> bool:
        """Whether the section has no content besides notes."""
        shown = (self.statements, self.arms, self.figures, self.positions, self.grids, self.rows)
        return not any(shown)


def render_study_page(report: StudyReport, figures: Sequence[FigureFile], provenance: Mapping[str, Any]) -> str:
    """Return the page of a study. Markup in a name, a path or a reason is escaped."""
    slices = slice_report(report)
    shared = _shared_values(report, report.title, provenance)
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
    return _fill("study.html.j2", shared | values)


def _sections(slices: Slices, figures: Mapping[str, FigureFile], positions: bool) -> list[Section]:
    """Return every section, including those without content."""
    report = slices.report

    def drawn(*stems: str) -> list[dict[str, str]]:
        return _embedded(figures[stem] for stem in stems if stem in figures)

    maps = drawn(*(stem for stem in figures if stem.startswith("tasks_")))
    return [
        Section("Arms", _trunk_notes(report), arms=_arms(slices), figures=drawn("tau", "marginal_acceptance")),
        Section(
            "Differences", _difference_notes(slices), grids=_given(difference_grid(slices), difference_matrix(slices))
        ),
        Section("What to serve", statements=tuple(serving_sentences(slices))),
        Section("By position in the draft", positions=positions),
        Section("By task", figures=maps, grids=_given(task_grid(slices))),
        Section("By temperature", (_RULE_NOTE,), grids=_given(temperature_grid(slices))),
        Section("By depth", figures=drawn("depth"), grids=_given(depth_grid(slices))),
        Section("By context", figures=drawn("context"), grids=_given(context_grid(slices))),
        Section("Along the output", figures=drawn("output_position")),
        Section("What it costs", figures=drawn("costs"), grids=_given(cost_grid(slices))),
        Section("The served model", rows=flatten(report.endpoint or {})),
    ]


_RULE_NOTE = "Compare arms within one temperature and rule only: which head is better can depend on both."


def _setting_sentence(slices: Slices) -> str:
    if slices.headline is None:
        return ""
    return (
        f"Unless a table states another setting: {setting_words(slices.headline)}. "
        f"All {len(slices.report.cells):,} cells of the grid are in acceptance.csv."
    )


def _arms(slices: Slices) -> list[dict[str, Any]]:
    ranked = ranked_arms(slices)
    best = ranked[0][0] if len(ranked) > 1 else None
    rows = []
    for name, arm in slices.report.arms.items():
        rows += _arm_rows({name: arm}, "" if arm.measured_here else "recorded", focus=best)
    return rows


def _trunk_notes(report: StudyReport) -> tuple[str, ...]:
    if len({arm.trunk for arm in report.arms.values()}) < 2:
        return ()
    return (
        "These arms have different trunks, which write different texts, and text of low entropy is easier to draft. "
        "Between trunks, compare heads by the difference in overlap at equal entropy.",
    )


def _difference_notes(slices: Slices) -> tuple[str, ...]:
    return (
        "First arm minus second, paired by prompt, intervals over groups of prompts. "
        f"{count_real(slices)} of the report's comparisons are real, at 5 % over all of them together (Holm). "
        "Other settings are in comparisons.csv.",
    )


def _given(*grids: Grid | None) -> tuple[Grid, ...]:
    return tuple(grid for grid in grids if grid is not None)
