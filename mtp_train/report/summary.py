"""The summary of a report for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mtp_train.evaluation.results import Report
from mtp_train.report import wording
from mtp_train.report.tables import NARROW, TextTable, arms_table, task_matrices

TONES = {"good": "green", "bad": "red", "neutral": "cyan"}


def summary(report: Report) -> RenderableType:
    """Return verdict, arms, power of the gate, tasks, differences and what to serve as one rich renderable."""
    verdict = wording.headline(report)
    # `Text`, since rich would parse square brackets of a path as markup. Inside the panel, since rich truncates titles.
    parts: list[RenderableType] = [
        Panel(Text.assemble((verdict.statement, "bold"), "\n", verdict.evidence), border_style=TONES[verdict.tone])
    ]
    if not report.arms:
        return parts[0]
    findings = [Text.assemble((one.statement, TONES[one.tone]), f"\n  {one.evidence}") for one in report.findings[1:]]
    parts += [_title("Findings"), *findings] if findings else []
    if report.headline:
        parts.append(Text(f"{wording.capitalised(wording.setting_words(report.headline))}\n"))
    groups = wording.group_arms(report)
    parts += rich_table(arms_table(groups, NARROW))
    if groups[wording.APART]:
        parts.append(Text(wording.apart_sentence(groups, report.settings)))
    if power := wording.power_sentence(report.gate):
        parts.append(Text(power))
    for title, table in task_matrices(report).items():
        parts += [_title(title), *rich_table(table)]
    if report.comparisons:
        differences = (
            f"{row.first} - {row.second}: {wording.signed(row.delta_tau, row.delta_tau_ci95)} over {row.groups} "
            f"groups: {wording.difference_words(row)}"
            for row in report.compared
        )
        parts.append(_title(f"Differences: {wording.count_real(report)} are real, over the whole grid"))
        parts.append(Text("\n".join(differences)))
    if serving := wording.serving_sentences(report):
        parts += [_title("What to serve"), Text("\n".join(serving))]
    parts.append(Text(f"\nLossless: {wording.lossless_sentence(report.lossless)}"))
    if held_out := wording.held_out_sentence(report.settings):
        parts.append(Text(f"Held out: {held_out}"))
    return Group(*parts)


def rich_table(table: TextTable | None) -> list[Table]:
    if table is None:
        return []
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(table.columns):
        shown.add_column(Text(column), justify="right" if index else "left", no_wrap=index < 2, overflow="fold")
    for title, rows in table.groups.items():
        if title:
            shown.add_row(Text(f"{title}:", style="dim"))
        for name, *cells in rows:
            shown.add_row(Text(name.partition("\n")[0]), *map(Text, cells))
        shown.add_section()
    return [shown]


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")
