"""Tables of a report as text, shared by the page and the terminal; ``glossary.html.j2`` explains the headings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from mtp_train.acceptance.gate import GateVerdict
from mtp_train.acceptance.names import PLAIN
from mtp_train.evaluation.results import ArmResult, Cell, Report
from mtp_train.report.wording import (
    SPEED_VERDICTS,
    Arms,
    bounds,
    depth_words,
    difference_words,
    format_estimate,
    format_number,
    format_percent,
    format_seconds,
    format_shares,
    format_tau,
    signed,
)


class TextTable(NamedTuple):
    """A table of text; its first column is for the names of the rows, and further lines in it for details."""

    columns: tuple[str, ...]
    groups: Mapping[str, Sequence[tuple[str, ...]]]
    """Rows by the title of their group; an empty title is not shown."""
    kind: Literal["grid", "prose", "arms"] = "grid"
    """The page's style; the last column of ``prose`` holds sentences."""


PER_POSITION = ("marginal", "conditional", "dense", "overlap")
"""Figures of an arm with a share per position in the draft."""
MAX_INTERVALS = 3
"""The most columns with intervals that fit in 80 characters; a table of more arms shows tau alone."""
_TAU_VERDICTS = {"above": "gain shown", "below": "loss shown", "neither": "not shown"}
PAYS = {"above": "yes", "below": "no", "neither": "undecided", None: "-"}

_ARM_COLUMNS: dict[str, Callable[[ArmResult], str]] = {
    "tau [95 %]": format_tau,
    "groups": lambda arm: format_number(None if arm.tau_ci95 is None else arm.groups, 0),
    "by position": lambda arm: format_shares(arm.marginal),
    "tokens/s": lambda arm: format_number(arm.tokens_per_second, 1),
    "speedup [95 %]": lambda arm: format_estimate(arm.speedup, arm.speedup_ci95),
    "repeats": lambda arm: format_percent(arm.repeated_8gram_share),
    "entropy": lambda arm: format_number(arm.target_entropy, 2),
}
NARROW = ("tau [95 %]", "by position", "tokens/s", "speedup [95 %]")
"""Columns of the arms that fit in 80 characters."""
_CELL_COLUMNS: dict[str, Callable[[Cell], str]] = {
    **_ARM_COLUMNS,
    "prompts": lambda cell: format_number(cell.prompts, 0),
    "overlap": lambda cell: format_shares((cell.overlap or ())[:1]),
    "prompt tokens": lambda cell: format_number(cell.mean_prompt_tokens, 0),
    "prefill": lambda cell: format_seconds(cell.seconds_prefill),
    "round": lambda cell: format_seconds(cell.round_seconds),
    "tau needed": lambda cell: format_number(cell.break_even_tau, 2),
    "pays": lambda cell: PAYS[cell.pays],
}
_TASK_COLUMNS = ("tau [95 %]", "groups", "by position", "overlap", "entropy", "speedup [95 %]")
_AXES = {
    "task": _TASK_COLUMNS,
    "setting": _TASK_COLUMNS,
    "drafts": ("prompts", "tau [95 %]", "groups", "tau needed", "round", "speedup [95 %]", "pays"),
    "context": (*_TASK_COLUMNS, "prompt tokens", "prefill"),
}
"""Columns of the tables along an axis of the grid, by the heading of its points."""


def make_table(
    columns: Sequence[str],
    groups: Mapping[str, Sequence[tuple[str, ...]]],
    kind: Literal["grid", "prose", "arms"] = "grid",
) -> TextTable | None:
    kept = {title: rows for title, rows in groups.items() if rows}
    return TextTable(tuple(columns), kept, kind) if kept else None


def arms_table(groups: Mapping[str, Arms], columns: Sequence[str] = tuple(_ARM_COLUMNS)) -> TextTable | None:
    """Return a row for each arm, with its trunk and head below its name; groups by their title."""

    def row(name: str, arm: ArmResult) -> tuple[str, ...]:
        head = f"\nhead: {arm.head}" if arm.head else ""
        return (f"{name}\n{arm.trunk}{head}", *(_ARM_COLUMNS[column](arm) for column in columns))

    return make_table(
        ("arm", *columns), {title: [row(*named) for named in arms.items()] for title, arms in groups.items()}, "arms"
    )


def axis_tables(report: Report) -> dict[str, TextTable | None]:
    """Return a table of the arms along each axis through the headline setting; None for an axis with a single point."""
    temperatures = report.along("temperature", "top_p", "top_k", "rule")
    points = {
        "task": [(task, report.at(report.headline, task)) for task in report.tasks],
        "setting": [(one.name, report.at(one)) for one in temperatures],
        "drafts": [(depth_words(one.depth), report.at(one)) for one in report.along("depth")],
        "context": [(context_words(one.context_tokens), report.at(one)) for one in report.along("context_tokens")],
    }
    return {
        axis: _point_table(report, axis, points[axis], columns) if len(points[axis]) > 1 else None
        for axis, columns in _AXES.items()
    }


def context_words(context_tokens: int | None) -> str:
    return "own" if context_tokens is None else f"{context_tokens:,}"


def _point_table(
    report: Report, name: str, points: Sequence[tuple[str, Mapping[str, Cell]]], columns: Sequence[str]
) -> TextTable | None:
    """Return a group per point (label, cells) with a row per arm; with a single arm, one row per point.

    A column without any figure is left out.
    """
    groups: dict[str, list[tuple[str, ...]]] = {}
    alone = len(report.drafting) == 1
    every = [cell for _, cells in points for cell in cells.values()]
    columns = [column for column in columns if any(_CELL_COLUMNS[column](cell) != "-" for cell in every)]
    for label, cells in points:
        for arm, cell in cells.items():
            groups.setdefault("" if alone else label, []).append(
                (label if alone else arm, *(_CELL_COLUMNS[column](cell) for column in columns))
            )
    return make_table((name if alone else "arm", *columns), groups)


def task_matrices(report: Report) -> dict[str, TextTable]:
    """Return tau and speedup by task and arm, by their titles; none of a figure that is not known, or for one task.

    At the headline setting; of a server that makes another number of drafts, at its own.
    """
    if report.headline is None or len(report.tasks) < 2:
        return {}
    settings = {
        arm: cells.get(report.headline.depth, next(iter(cells.values()))).setting
        for arm in report.drafting
        if (cells := report.by_depth(arm))
    }
    bare = len(settings) > MAX_INTERVALS
    shown: dict[str, Callable[[Cell], str]] = {
        "Tau by task": lambda cell: format_number(cell.tau, 2) if bare else format_tau(cell),
        "Speedup by task": lambda cell: format_estimate(cell.speedup, None if bare else cell.speedup_ci95),
    }
    found = {}
    for title, show in shown.items():
        rows = []
        for task in report.tasks:
            places = [report.by_place.get((arm, task, setting)) for arm, setting in settings.items()]
            rows.append((task, *("-" if cell is None else show(cell) for cell in places)))
        if any({*row[1:]} != {"-"} for row in rows):
            found[title] = TextTable(("task", *settings), {"": rows})
    return found


def difference_table(report: Report) -> TextTable | None:
    """Return the comparisons over all tasks together, at the headline setting; None without comparisons."""
    rows = [
        (
            f"{row.first} - {row.second}",
            signed(row.delta_tau, row.delta_tau_ci95),
            str(row.groups),
            "<0.001" if row.p_value is not None and row.p_value < 0.001 else format_number(row.p_value, 3),
            "yes" if row.differs else "no",
            signed(row.delta_overlap_at_equal_entropy, row.delta_overlap_at_equal_entropy_ci95, 3),
            difference_words(row),
        )
        for row in report.compared
    ]
    return make_table(
        ("first - second", "tau [95 %]", "groups", "p", "real", "overlap at equal entropy", "in words"),
        {"": rows},
        "prose",
    )


def gate_table(gate: GateVerdict | None) -> TextTable | None:
    """Return the gate's figures at each setting; None without any. Against plain decoding the speed decides."""
    if gate is None:
        return None
    against_plain = gate.baseline == PLAIN
    verdicts = SPEED_VERDICTS if against_plain else _TAU_VERDICTS
    rows = []
    for one in gate.settings:
        decides = [f"{one.baseline_tau:.2f}", bounds(one.delta_tau_ci95, "+.2f").strip() or "-"]
        if against_plain:
            decides = [format_number(one.break_even_tau, 2), format_estimate(one.speedup, one.speedup_ci95)]
        detectable = "-" if one.detectable_gain is None else f"+{one.detectable_gain:.2f}"
        counts = str(one.prompts), str(one.groups), format_estimate(one.tau, one.tau_ci95)
        rows.append((one.setting, *counts, *decides, verdicts[one.verdict], detectable))
    decides = ["tau needed", "speedup [95 %]"] if against_plain else ["baseline", "gain [95 %]"]
    return make_table(("setting", "prompts", "groups", "tau", *decides, "verdict", "detectable"), {"": rows})


def position_table(report: Report) -> TextTable | None:
    groups = {
        name: [
            (kind, *(format_number(share, 3) for share in shares))
            for kind in PER_POSITION
            if (shares := getattr(arm, kind))
        ]
        for name, arm in report.arms.items()
    }
    width = max((len(row) for rows in groups.values() for row in rows), default=0)
    padded = {name: [row + ("-",) * (width - len(row)) for row in rows] for name, rows in groups.items()}
    return make_table(("figure", *map(str, range(1, width))), padded)
