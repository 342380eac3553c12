"""Tables of a report as text, shared by the page and the terminal; ``glossary.html.j2`` explains the headings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtp_train.acceptance.gate import GateVerdict
from mtp_train.acceptance.names import PLAIN
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, Cell, Report
from mtp_train.report.slices import Slices
from mtp_train.report.wording import (
    depth_words,
    difference_words,
    format_estimate,
    format_groups,
    format_number,
    format_seconds,
    format_shares,
    format_tau,
    pair_words,
    signed,
)


@dataclass(frozen=True)
class TextTable:
    """A table of text; its first column is for the names of the rows."""

    columns: tuple[str, ...]
    groups: Mapping[str, Sequence[tuple[str, ...]]]
    """Rows by the title of their group; an empty title is not shown."""
    prose: bool = False
    """Whether the last column holds sentences."""


MAX_INTERVALS = 3
"""The most columns with intervals that fit in 80 characters; a table of more arms shows tau alone."""
_TAU_VERDICTS = {"above": "gain shown", "below": "loss shown", "neither": "not shown"}
_SPEED_VERDICTS = {"above": "drafts pay", "below": "drafts do not pay", "neither": "undecided"}
PAYS = {"above": "yes", "below": "no", "neither": "undecided", None: "-"}

_CELL_COLUMNS: dict[str, Callable[[Cell], str]] = {
    "prompts": lambda cell: format_number(cell.prompts, 0),
    "tau [95 %]": format_tau,
    "groups": format_groups,
    "by position": lambda cell: format_shares(cell.marginal),
    "overlap": lambda cell: format_shares((cell.overlap or ())[:1]),
    "entropy": lambda cell: format_number(cell.target_entropy, 2),
    "prompt tokens": lambda cell: format_number(cell.mean_prompt_tokens, 0),
    "prefill": lambda cell: format_seconds(cell.seconds_prefill),
    "round": lambda cell: format_seconds(cell.round_seconds),
    "tau needed": lambda cell: format_number(cell.break_even_tau, 2),
    "speedup [95 %]": lambda cell: format_estimate(cell.speedup, cell.speedup_ci95),
    "pays": lambda cell: PAYS[cell.pays],
}
_TASK_COLUMNS = ("tau [95 %]", "groups", "by position", "overlap", "entropy")
_AXES = {
    "task": _TASK_COLUMNS,
    "setting": (*_TASK_COLUMNS, "speedup [95 %]"),
    "drafts": ("prompts", "tau [95 %]", "groups", "tau needed", "round", "speedup [95 %]", "pays"),
    "context": ("tau [95 %]", "groups", "by position", "prompt tokens", "prefill", "speedup [95 %]"),
}
"""Columns of the tables along an axis of the grid, by the heading of its points."""


def make_table(
    columns: Sequence[str], groups: Mapping[str, Sequence[tuple[str, ...]]], *, prose: bool = False
) -> TextTable | None:
    kept = {title: rows for title, rows in groups.items() if rows}
    return TextTable(tuple(columns), kept, prose) if kept else None


def axis_tables(slices: Slices) -> dict[str, TextTable | None]:
    """Return a table of the arms along each axis through the headline setting; None for an axis with a single point."""
    headline, everywhere = slices.headline, ALL_TASKS
    points: dict[str, list[tuple[str, str, Setting]]] = {
        "task": [] if headline is None else [(task, task, headline) for task in slices.tasks],
        "setting": [(setting.name, everywhere, setting) for setting in slices.temperatures()],
        "drafts": [(depth_words(setting.depth), everywhere, setting) for setting in slices.depths()],
        "context": [(context_words(setting.context_tokens), everywhere, setting) for setting in slices.contexts()],
    }
    return {
        axis: _point_table(slices, axis, points[axis], columns) if len(points[axis]) > 1 else None
        for axis, columns in _AXES.items()
    }


def context_words(context_tokens: int | None) -> str:
    return "own" if context_tokens is None else f"{context_tokens:,}"


def _point_table(
    slices: Slices, name: str, points: Sequence[tuple[str, str, Setting]], columns: Sequence[str]
) -> TextTable | None:
    """Return a group per point (label, task, setting) with a row per arm; with a single arm, one row per point."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    alone = len(slices.arms) == 1
    for label, task, setting in points:
        for arm, cell in slices.drafting(task, setting).items():
            row = (label if alone else arm, *(_CELL_COLUMNS[column](cell) for column in columns))
            groups.setdefault("" if alone else label, []).append(row)
    return make_table((name if alone else "arm", *columns), groups)


def tau_matrix(slices: Slices) -> TextTable | None:
    """Return tau by task and arm, at the headline setting; None for a single task."""
    if slices.headline is None or len(slices.tasks) < 2:
        return None
    show = format_tau if len(slices.arms) <= MAX_INTERVALS else lambda cell: format_number(cell.tau, 2)
    rows = []
    for task in slices.tasks:
        cells = slices.drafting(task, slices.headline)
        groups = sorted({cell.groups for cell in cells.values() if cell.tau_ci95 and cell.groups})
        counted = f" ({' to '.join(map(str, dict.fromkeys((groups[0], groups[-1]))))} groups)" if groups else ""
        rows.append((f"{task}{counted}", *(show(cells[arm]) if arm in cells else "-" for arm in slices.arms)))
    return make_table(("task", *slices.arms), {"": rows})


def difference_table(slices: Slices) -> TextTable | None:
    """Return the comparisons over all tasks together, at the headline setting; None without comparisons."""
    rows = [
        (
            pair_words(row),
            signed(row.delta_tau, row.delta_tau_ci95),
            str(row.groups),
            _p_value(row.p_value),
            "yes" if row.differs else "no",
            signed(row.delta_overlap_at_equal_entropy, row.delta_overlap_at_equal_entropy_ci95, 3),
            difference_words(row),
        )
        for row in slices.comparisons()
        if row.task == ALL_TASKS
    ]
    columns = ("first - second", "tau [95 %]", "groups", "p", "real", "overlap at equal entropy", "in words")
    return make_table(columns, {"": rows}, prose=True)


def _p_value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def gate_table(gate: GateVerdict | None) -> TextTable | None:
    """Return the gate's figures at each setting; None without any. Against plain decoding the speed decides."""
    if gate is None:
        return None
    against_plain = gate.baseline == PLAIN
    verdicts = _SPEED_VERDICTS if against_plain else _TAU_VERDICTS
    rows = []
    for one in gate.settings:
        gain = "-" if one.delta_tau_ci95 is None else "[{:+.2f}, {:+.2f}]".format(*one.delta_tau_ci95)
        decides = [f"{one.baseline_tau:.2f}", gain]
        if against_plain:
            decides = [format_number(one.break_even_tau, 2), format_estimate(one.speedup, one.speedup_ci95)]
        detectable = "-" if one.detectable_gain is None else f"+{one.detectable_gain:.2f}"
        counts = str(one.prompts), str(one.groups), format_estimate(one.tau, one.tau_ci95)
        rows.append((one.setting, *counts, *decides, verdicts[one.verdict], detectable))
    decides = ["tau needed", "speedup [95 %]"] if against_plain else ["baseline", "gain [95 %]"]
    return make_table(("setting", "prompts", "groups", "tau", *decides, "verdict", "detectable"), {"": rows})


def position_table(report: Report) -> TextTable | None:
    kinds = ("marginal", "conditional", "dense", "overlap")
    figures = {
        name: {kind: shares for kind in kinds if (shares := getattr(arm, kind))} for name, arm in report.arms.items()
    }
    depth = max((len(shares) for by_kind in figures.values() for shares in by_kind.values()), default=0)
    groups = {
        name: [
            (kind, *(format_number(share, 3) for share in (*shares, *[None] * (depth - len(shares)))))
            for kind, shares in by_kind.items()
        ]
        for name, by_kind in figures.items()
    }
    return make_table(("figure", *(str(k) for k in range(1, depth + 1))), groups)
