"""Tables of a study's report as text, shared by the page and the terminal.

``study_wording.STUDY_GLOSSARY`` explains the headings to the report's readers. An arm is a head or another drafter. The
headline setting is defined in ``study_slices.py``. The column "groups" counts the groups of prompts behind an interval;
a :class:`Group` is something else, a part of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mtp_train.evaluation.cells import ALL_TASKS, Cell
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.report.study_slices import Slices
from mtp_train.report.study_wording import RULE_WORDS, depth_words, difference_words, pair_words, signed
from mtp_train.report.wording import (
    count_words,
    format_bytes,
    format_groups,
    format_number,
    format_seconds,
    format_shares,
    format_speedup,
    format_tau,
)


@dataclass(frozen=True)
class Row:
    """A row: its name, and one cell for each column after the first."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Rows under a common title; an empty title is not shown."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        columns: Headings; the first is for the names of the rows.
        groups: At least one group, none of them empty.
        prose: Whether the last column holds sentences.
    """

    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    prose: bool = False


Point = tuple[str, str, Setting]
"""A label, a task and a setting."""

Texts = dict[str, dict[str, dict[str, str]]]
"""Title of a group to name of a row to column to text of a cell."""

MAX_INTERVALS = 3
"""The most columns with intervals that fit in 80 characters; a table of more arms shows tau alone."""

_CELL_COLUMNS: dict[str, Callable[[Cell], str]] = {
    "tau [95 %]": format_tau,
    "groups": format_groups,
    "macro": lambda cell: format_number(cell.tau_macro, 2),
    "by position": lambda cell: format_shares(cell.marginal),
    "overlap": lambda cell: format_shares((cell.overlap or ())[:1]),
    "entropy": lambda cell: format_number(cell.target_entropy, 2),
    "prompt tokens": lambda cell: format_number(cell.mean_prompt_tokens, 0),
    "prefill": lambda cell: format_seconds(cell.seconds_prefill),
    "round": lambda cell: format_seconds(cell.round_seconds),
    "tau needed": lambda cell: format_number(cell.break_even_tau, 2),
    "speedup": lambda cell: format_speedup(cell.speedup),
}
TASK_COLUMNS = ("tau [95 %]", "groups", "macro", "by position", "overlap", "entropy", "speedup")


def task_grid(slices: Slices) -> Grid | None:
    """Return the arms on every task, at the headline setting; None for a single task."""
    if slices.headline is None or len(slices.tasks) < 2:
        return None
    return _point_grid(slices, "task", [(task, task, slices.headline) for task in slices.tasks], TASK_COLUMNS)


def temperature_grid(slices: Slices) -> Grid | None:
    """Return the arms at every temperature and rule, over all tasks; None for a single setting."""
    points = [(f"{s.temperature:g}, {RULE_WORDS[s.rule]}", ALL_TASKS, s) for s in slices.temperatures()]
    return _point_grid(slices, "temperature", points, TASK_COLUMNS) if len(points) > 1 else None


def depth_grid(slices: Slices) -> Grid | None:
    """Return the arms at every depth, over all tasks; None for a single depth."""
    points = [(depth_words(s.depth), ALL_TASKS, s) for s in slices.depths()]
    columns = ("tau [95 %]", "groups", "tau needed", "round", "speedup")
    return _point_grid(slices, "drafts", points, columns) if len(points) > 1 else None


def context_grid(slices: Slices) -> Grid | None:
    """Return the arms at every context length, over all tasks; None for a single length."""
    labels = ["own" if s.context_tokens is None else f"{s.context_tokens:,}" for s in slices.contexts()]
    points = [(label, ALL_TASKS, s) for label, s in zip(labels, slices.contexts(), strict=True)]
    columns = ("tau [95 %]", "groups", "by position", "prompt tokens", "prefill", "speedup")
    return _point_grid(slices, "context", points, columns) if len(points) > 1 else None


def tau_matrix(slices: Slices) -> Grid | None:
    """Return tau by task and arm, at the headline setting; None for a single task."""
    if slices.headline is None or len(slices.tasks) < 2:
        return None
    show = format_tau if len(slices.arms) <= MAX_INTERVALS else lambda cell: format_number(cell.tau, 2)
    by_task = {task: slices.drafting(task, slices.headline) for task in slices.tasks}
    texts = {
        _task_words(task, [cell.groups for cell in cells.values() if cell.tau_ci95]): {
            arm: show(cell) for arm, cell in cells.items()
        }
        for task, cells in by_task.items()
    }
    return make_matrix("task", slices.arms, {"": {task: by_arm for task, by_arm in texts.items() if by_arm}})


def difference_grid(slices: Slices) -> Grid | None:
    """Return the comparisons over all tasks together, at the headline setting; None without comparisons."""
    rows = [
        Row(
            pair_words(row),
            (
                signed(row.delta_tau, row.delta_tau_ci95),
                str(row.groups),
                _p_value(row.p_value),
                "yes" if row.differs else "no",
                signed(row.delta_overlap_at_equal_entropy, row.delta_overlap_at_equal_entropy_ci95, 3),
                difference_words(row),
            ),
        )
        for row in slices.comparisons()
        if row.task == ALL_TASKS
    ]
    columns = ("first - second", "tau [95 %]", "groups", "p", "real", "overlap at equal entropy", "in words")
    return make_grid(columns, {"": rows}, prose=True)


def difference_matrix(slices: Slices) -> Grid | None:
    """Return the comparisons on single tasks, at the headline setting; None without comparisons.

    "not shown" stands for a difference that is not significant.
    """
    texts: dict[str, dict[str, str]] = {}
    for row in slices.comparisons():
        if row.task != ALL_TASKS:
            text = signed(row.delta_tau, row.delta_tau_ci95) if row.differs else "not shown"
            texts.setdefault(_task_words(row.task, [row.groups]), {})[pair_words(row)] = text
    pairs = dict.fromkeys(pair for by_pair in texts.values() for pair in by_pair)
    return make_matrix("task", tuple(pairs), {"": texts})


def _task_words(task: str, groups: Iterable[int | None]) -> str:
    """Return a task's name with the number of groups behind its intervals."""
    known = [count for count in groups if count is not None]
    return f"{task} ({count_words(known)})" if known else task


def _point_grid(slices: Slices, name: str, points: Sequence[Point], columns: Sequence[str]) -> Grid | None:
    """Return a group per point with a row per arm; with a single arm, one row per point.

    Args:
        slices: The report.
        name: Heading of the points, for a single arm.
        points: What the rows are about.
        columns: Keys of :data:`_CELL_COLUMNS`.
    """
    groups: dict[str, list[Row]] = {}
    for label, task, setting in points:
        for arm, cell in slices.drafting(task, setting).items():
            row = Row(label if len(slices.arms) == 1 else arm, tuple(_CELL_COLUMNS[column](cell) for column in columns))
            groups.setdefault("" if len(slices.arms) == 1 else label, []).append(row)
    return make_grid((name if len(slices.arms) == 1 else "arm", *columns), groups)


def make_matrix(name: str, columns: Sequence[str], texts: Texts) -> Grid | None:
    """Return texts as a table, with a dash in empty cells; None without any row."""
    groups = {
        title: [Row(row, tuple(by_column.get(column, "-") for column in columns)) for row, by_column in rows.items()]
        for title, rows in texts.items()
    }
    return make_grid((name, *columns), groups)


def make_grid(columns: Sequence[str], groups: dict[str, list[Row]], *, prose: bool = False) -> Grid | None:
    """Return a table without its empty groups; None where all are empty."""
    kept = tuple(Group(title, tuple(rows)) for title, rows in groups.items() if rows)
    return Grid(tuple(columns), kept, prose) if kept else None


def _p_value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def cost_grid(slices: Slices) -> Grid | None:
    """Return memory and prefill costs of each head; None where none were measured."""
    rows = [
        Row(
            cost.arm,
            (
                format_bytes(cost.head_bytes),
                f"{format_bytes(cost.head_kv_bytes_per_token)} on {format_bytes(cost.trunk_kv_bytes_per_token)}",
                format_bytes(cost.trunk_state_bytes),
                format_number(cost.context_tokens_lost, 0),
                _prefill(cost.prefill_ratio, cost.prefill_tokens),
            ),
        )
        for cost in slices.report.costs
    ]
    columns = ("arm", "weights", "KV cache per token", "trunk's state", "context given up", "prompt speed")
    return make_grid(columns, {"": rows})


def _prefill(ratio: float | None, tokens: int | None) -> str:
    if ratio is None:
        return "-"
    return format_speedup(ratio) + (f" at {tokens:,} tokens" if tokens else "")
