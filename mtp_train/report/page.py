"""Render a report as one HTML file without scripts or network, figures included; the template is in ``templates/``."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mtp_train.acceptance.names import RETRAINED
from mtp_train.evaluation.results import ArmResult, Report, SampleText
from mtp_train.report.figures import FigureFile
from mtp_train.report.slices import Slices, slice_report
from mtp_train.report.tables import (
    TextTable,
    context_table,
    cost_table,
    depth_table,
    difference_matrix,
    difference_table,
    gate_table,
    position_table,
    task_table,
    temperature_table,
)
from mtp_train.report.wording import (
    COLUMNS,
    GLOSSARY,
    apart_sentence,
    arm_cells,
    capitalised,
    count_real,
    flatten,
    group_arms,
    headline,
    held_out_sentence,
    key_figures,
    lossless_sentence,
    power_sentence,
    recorded_sentence,
    serving_sentences,
    setting_words,
)

_RULE_NOTE = "Compare arms within one temperature and rule only: which head is better can depend on both."
_SAMPLE_NOTE = (
    "Held-out prompts (grey) and their texts. Marked: drafts that the trunk accepted; the other tokens are the trunk's "
    "own, one a round."
)
_GATE_NOTE = (
    "The gate passes when the interval of the gain, paired by prompt and over groups of prompts, lies above 0 at one "
    "setting at least (Holm's correction over the settings) and below 0 at none. The last column is the gain that the "
    "gate detects with probability 0.8. Against plain decoding, which accepts no draft, the gate asks for a measured "
    "speedup whose interval lies above 1, or, where gate.break_even_tau is set, for a tau whose interval lies above "
    "it; an interval on both sides is undecided."
)


@dataclass(frozen=True)
class Section:
    """A heading and its content, shown in the order of the fields."""

    title: str
    notes: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    """Sentences that are content of their own."""
    arms: Sequence[Mapping[str, Any]] = ()
    figures: Sequence[Mapping[str, str]] = ()
    tables: Sequence[TextTable | None] = ()
    samples: Sequence[SampleText] = ()
    rows: Sequence[tuple[str, str]] = ()
    """Names and values."""

    @property
    def anchor(self) -> str:
        """The fragment of a link to the section."""
        return self.title.lower().replace(" ", "-").strip("?")

    @property
    def is_empty(self) -> bool:
        """Whether the section has no content besides notes."""
        return not (self.statements or self.arms or self.figures or any(self.tables) or self.samples or self.rows)


def render_page(
    report: Report, figures: Sequence[FigureFile], provenance: Mapping[str, Any], serving: Mapping[str, str]
) -> str:
    """Return the page of a report. Markup in a name, a path or a reason is escaped.

    ``serving`` are the commands that serve the export, by engine.
    """
    slices = slice_report(report)
    verdict = headline(slices)
    subject = report.title or next((arm.trunk for arm in group_arms(report).alike.values()), "")
    sections = [*_sections(slices, figures, serving), Section("Provenance", rows=flatten(provenance))]
    environment = Environment(
        loader=PackageLoader("mtp_train.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        subject=subject,
        headline=verdict,
        key_figures=key_figures(slices),
        findings=[one for one in report.findings if one.evidence != verdict.detail],
        setting_sentence=_setting_sentence(slices),
        sections=[section for section in sections if not section.is_empty],
        columns=COLUMNS,
        before=report.gate.baseline if report.gate else "",
        after=RETRAINED,
        glossary=GLOSSARY,
    )


def _sections(slices: Slices, drawn: Sequence[FigureFile], serving: Mapping[str, str]) -> list[Section]:
    """Return every section, including those without content."""
    report, groups = slices.report, group_arms(slices.report)
    ranked = slices.ranked()
    focus = RETRAINED if RETRAINED in groups.alike else ranked[0][0] if len(ranked) > 1 else None

    def figures(*stems: str) -> list[dict[str, str]]:
        chosen = [figure for stem in stems for figure in drawn if figure.stem.startswith(stem)]
        return [{"caption": figure.caption, "base64": base64.b64encode(figure.png).decode()} for figure in chosen]

    gate, told = report.gate, tuple[str, ...]()
    if gate is not None:
        told = (f"{gate.outcome.capitalize()} against {gate.baseline}. {capitalised(gate.reason)}",)
    real = (
        "First arm minus second, paired by prompt, intervals over groups of prompts. "
        f"{count_real(report)} of the report's comparisons are real, at 5 % over all of them together (Holm). "
        "Other settings are in comparisons.csv."
    )
    held_out = held_out_sentence(report.settings)
    return [
        Section("Same trunk, same prompts", arms=_arm_rows(groups.alike, "", focus)),
        Section(
            "Another trunk, shown apart",
            (apart_sentence(groups, report.settings),),
            arms=_arm_rows(groups.apart, "other trunk", focus),
        ),
        Section("What to serve", statements=tuple(serving_sentences(slices)), rows=tuple(serving.items())),
        Section("Figures", figures=figures("tau", "marginal_acceptance", "speedup")),
        Section("Training", figures=figures("loss", "held_out", "learning_rate")),
        Section("Differences", (real,), tables=(difference_table(slices), difference_matrix(slices))),
        Section("By position in the draft", tables=(position_table(report),)),
        Section("By task", figures=figures("tasks_"), tables=(task_table(slices),)),
        Section("By temperature", (_RULE_NOTE,), tables=(temperature_table(slices),)),
        Section("By depth", figures=figures("depth"), tables=(depth_table(slices),)),
        Section("By context", figures=figures("context"), tables=(context_table(slices),)),
        Section("Along the output", figures=figures("output_position")),
        Section("What it costs", figures=figures("costs"), tables=(cost_table(report),)),
        Section("The served model", rows=flatten(report.endpoint or {})),
        Section("Sample texts", (_SAMPLE_NOTE,), samples=report.samples),
        Section("Is it lossless?", statements=(lossless_sentence(report.lossless),)),
        Section("Is the text new to the head?", statements=(held_out,) if held_out else ()),
        Section("The gate", (power_sentence(gate), _GATE_NOTE), told, tables=(gate_table(gate),)),
        Section(
            "Recorded, not measured here", (recorded_sentence(groups),), arms=_arm_rows(groups.recorded, "recorded")
        ),
        Section("Settings", rows=flatten(report.settings)),
    ]


def _setting_sentence(slices: Slices) -> str:
    if slices.headline is None:
        return ""
    return (
        f"Unless a table states another setting: {setting_words(slices.headline)}. "
        f"All {len(slices.report.cells):,} cells are in acceptance.csv."
    )


def _arm_rows(arms: Mapping[str, ArmResult], note: str, focus: str | None = None) -> list[dict[str, Any]]:
    """Return rows for the table of arms; the arm named ``focus`` is highlighted."""
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
