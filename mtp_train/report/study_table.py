"""The summary of a study for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mtp_train.evaluation.cells import ALL_TASKS, Finding, StudyReport
from mtp_train.report.study_grids import Grid, tau_matrix
from mtp_train.report.study_slices import Slices, slice_report
from mtp_train.report.study_wording import (
    count_real,
    difference_words,
    finding_headline,
    pair_words,
    serving_sentences,
    setting_words,
    signed,
    study_headline,
)
from mtp_train.report.table import TONES, plain_table, verdict_panel
from mtp_train.report.wording import (
    capitalised,
    format_groups,
    format_number,
    format_shares,
    format_speedup,
    format_tau,
    lossless_sentence,
)


def study_summary(report: StudyReport) -> RenderableType:
    """Return verdict, arms, tasks, differences and what to serve as one rich renderable."""
    slices = slice_report(report)
    parts: list[RenderableType] = [verdict_panel(study_headline(slices))]
    if report.findings[1:]:
        parts += [_title("Findings"), *map(_finding, report.findings[1:])]
    if slices.headline:
        parts += [Text(f"{capitalised(setting_words(slices.headline))}\n"), _arms(slices)]
    if tasks := tau_matrix(slices):
        parts += [_title("Tau by task"), _grid_table(tasks)]
    if report.comparisons:
        parts += [_title(f"Differences: {count_real(slices)} are real, over the whole grid"), _differences(slices)]
    if serving := serving_sentences(slices):
        parts += [_title("What to serve"), Text("\n".join(serving))]
    return Group(*parts, Text(f"\nLossless: {lossless_sentence(report.lossless)}"))


def _finding(finding: Finding) -> Text:
    tone = finding_headline(finding).tone
    return Text.assemble((finding.statement, TONES[tone]), f"\n  {finding.evidence}")


def _arms(slices: Slices) -> Table:
    table = plain_table("arm")
    for column in ("tau [95 %]", "groups", "by position", "speedup", "entropy"):
        table.add_column(column, justify="right", no_wrap=column == "tau [95 %]")
    for name, arm in slices.report.arms.items():
        cells = (
            format_tau(arm),
            format_groups(arm),
            format_shares(arm.marginal),
            format_speedup(arm.speedup),
            format_number(arm.target_entropy, 2),
        )
        table.add_row(Text(name), *map(Text, cells))
    return table


def _differences(slices: Slices) -> Text:
    lines = [
        f"{pair_words(row)}: {signed(row.delta_tau, row.delta_tau_ci95)} over {row.groups} groups: "
        f"{difference_words(row)}"
        for row in slices.comparisons()
        if row.task == ALL_TASKS
    ]
    return Text("\n".join(lines))


def _grid_table(grid: Grid) -> Table:
    table = plain_table(grid.columns[0])
    for column in grid.columns[1:]:
        table.add_column(Text(column), justify="right", overflow="fold")
    for group in grid.groups:
        for row in group.rows:
            table.add_row(Text(row.name), *map(Text, row.cells))
    return table


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")
