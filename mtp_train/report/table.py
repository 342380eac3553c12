"""The summary of a run for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mtp_train.evaluation.results import RunReport
from mtp_train.report.wording import (
    COLUMNS,
    GROUPS,
    Arms,
    Headline,
    apart_sentence,
    arm_cells,
    depth_lines,
    gate_lines,
    group_arms,
    group_sentence,
    headline,
    held_out_sentence,
    lossless_sentence,
    power_sentence,
    serving_sentence,
)

NARROW_COLUMNS = tuple(column for column in COLUMNS if column != GROUPS)
"""Columns that fit in 80 characters; the numbers of groups are printed below the table."""
TONES = {"good": "green", "bad": "red", "neutral": "cyan"}


def arm_table(report: RunReport) -> Table:
    """Return the table of arms: those on the run's trunk first, then other trunks, then recorded figures."""
    groups = group_arms(report)
    table = plain_table("arm")
    for index, column in enumerate(NARROW_COLUMNS):
        table.add_column(column, justify="right", no_wrap=index == 0)
    _add_rows(table, groups.alike, "")
    _add_rows(table, groups.apart, " *")
    _add_rows(table, groups.recorded, " +")
    notes = [told] if (told := group_sentence(report.arms)) else []
    if groups.apart:
        notes.append(f"* {apart_sentence(groups, report.settings)}")
    if groups.recorded:
        notes.append("+ Recorded earlier with settings of its own, not measured here.")
    table.caption = Text("\n".join(notes))
    return table


def summary(report: RunReport) -> RenderableType:
    """Return verdict, arms, gate and lossless check as one rich renderable."""
    parts: list[RenderableType] = [verdict_panel(headline(report))]
    if not report.arms:
        return parts[0]
    parts += [arm_table(report), _gate(report)]
    if serving := serving_sentence(report):
        parts.append(Text("\n".join([*depth_lines(report), serving, ""])))
    parts.append(Text(f"Lossless: {lossless_sentence(report.lossless)}"))
    if held_out := held_out_sentence(report.settings):
        parts.append(Text(f"Held out: {held_out}"))
    return Group(*parts)


def _gate(report: RunReport) -> Text:
    """Return the gate's figures at each setting and its power; empty without a gate."""
    lines = gate_lines(report.gate)
    return Text("\n".join([*lines, power_sentence(report.gate), ""]) if lines else "")


def verdict_panel(verdict: Headline) -> Panel:
    """Return the verdict in a frame."""
    # `Text`, since rich would parse square brackets of a path as markup. Inside the panel, since rich truncates titles.
    return Panel(Text.assemble((verdict.title, "bold"), "\n", verdict.detail), border_style=TONES[verdict.tone])


def plain_table(first: str) -> Table:
    """Return an empty table without a frame, with its first column."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, caption_justify="left")
    table.add_column(Text(first), no_wrap=True)
    return table


def _add_rows(table: Table, arms: Arms, note: str) -> None:
    for name, arm in arms.items():
        cells = dict(zip(COLUMNS, arm_cells(arm), strict=True))
        table.add_row(Text(name + note), *(Text(cells[column]) for column in NARROW_COLUMNS))
    table.add_section()
