"""The summary of a report for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mtp_train.acceptance.names import PLAIN
from mtp_train.evaluation.results import ALL_TASKS, Report
from mtp_train.report import wording
from mtp_train.report.slices import Slices, slice_report
from mtp_train.report.tables import gate_table, tau_matrix

NARROW_COLUMNS = tuple(column for column in wording.COLUMNS if column not in (wording.GROUPS, wording.REPEATS))
"""Columns that fit in 80 characters; the numbers of groups are printed below the table."""
TONES = {"good": "green", "bad": "red", "neutral": "cyan"}


def summary(report: Report) -> RenderableType:
    """Return verdict, arms, gate, tasks, differences and what to serve as one rich renderable."""
    slices = slice_report(report)
    verdict = wording.headline(slices)
    # `Text`, since rich would parse square brackets of a path as markup. Inside the panel, since rich truncates titles.
    told = Text.assemble((verdict.statement, "bold"), "\n", verdict.evidence)
    parts: list[RenderableType] = [Panel(told, border_style=TONES[verdict.tone])]
    if not report.arms:
        return parts[0]
    findings = [Text.assemble((one.statement, TONES[one.tone]), f"\n  {one.evidence}") for one in report.findings[1:]]
    parts += [_title("Findings"), *findings] if findings else []
    if slices.headline:
        parts.append(Text(f"{wording.capitalised(wording.setting_words(slices.headline))}\n"))
    parts.append(arm_table(report))
    if gate := _gate(report):
        parts.append(gate)
    if tasks := tau_matrix(slices):
        table = plain_table(tasks.columns[0])
        for column in tasks.columns[1:]:
            table.add_column(Text(column), justify="right", overflow="fold")
        for row in (row for rows in tasks.groups.values() for row in rows):
            table.add_row(*map(Text, row))
        parts += [_title("Tau by task"), table]
    if report.comparisons:
        parts += [
            _title(f"Differences: {wording.count_real(report)} are real, over the whole grid"),
            _differences(slices),
        ]
    if serving := wording.serving_sentences(slices):
        parts += [_title("What to serve"), Text("\n".join(serving))]
    parts.append(Text(f"\nLossless: {wording.lossless_sentence(report.lossless)}"))
    if held_out := wording.held_out_sentence(report.settings):
        parts.append(Text(f"Held out: {held_out}"))
    return Group(*parts)


def arm_table(report: Report) -> Table:
    """Return the table of arms: those on the first trunk, then other trunks, then recorded figures."""
    groups = wording.group_arms(report)
    table = plain_table("arm")
    for index, column in enumerate(NARROW_COLUMNS):
        table.add_column(column, justify="right", no_wrap=index == 0)
    for arms, note in ((groups.alike, ""), (groups.apart, " *"), (groups.recorded, " +")):
        for name, arm in arms.items():
            cells = dict(zip(wording.COLUMNS, wording.arm_cells(arm), strict=True))
            table.add_row(Text(name + note), *(Text(cells[column]) for column in NARROW_COLUMNS))
        table.add_section()
    notes = [told] if (told := wording.group_sentence(report.arms)) else []
    if groups.apart:
        notes.append(f"* {wording.apart_sentence(groups, report.settings)}")
    if groups.recorded:
        notes.append("+ Recorded earlier with settings of its own, not measured here.")
    table.caption = Text("\n".join(notes))
    return table


def _gate(report: Report) -> Text | None:
    """Return the gate's figures at each setting and its power; None without a gate."""
    table = gate_table(report.gate)
    if table is None:
        return None
    lines = []
    for setting, _, groups, tau, before, gain, verdict, _ in table.groups[""]:
        told = f"tau {before} to {tau}, gain {gain}"
        if report.gate is not None and report.gate.baseline == PLAIN:
            told = f"tau {tau}, tau needed {before}, speedup {gain}"
        lines.append(f"Gate, {setting}: {told} over {groups} groups: {verdict}")
    return Text("\n".join([*lines, wording.power_sentence(report.gate)]))


def _differences(slices: Slices) -> Text:
    lines = [
        f"{wording.pair_words(row)}: {wording.signed(row.delta_tau, row.delta_tau_ci95)} over {row.groups} groups: "
        f"{wording.difference_words(row)}"
        for row in slices.comparisons()
        if row.task == ALL_TASKS
    ]
    return Text("\n".join(lines))


def plain_table(first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, caption_justify="left")
    table.add_column(Text(first), no_wrap=True)
    return table


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")
