"""From the records of arms to their report: figures at every setting, and comparisons of arms."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
import transformers

from mtp_train.acceptance.intervals import holm, tau_difference
from mtp_train.evaluation.entropy import EntropySums, fine_edges, overlap_difference
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmComparison, ArmCosts, Report
from mtp_train.evaluation.served import Served
from mtp_train.evaluation.statistics import (
    MeasuredArm,
    checked_records,
    lossless,
    make_cell,
    make_cells,
    position_bins,
)

LEVEL = 0.05
"""Probability of any false finding among all comparisons of a report."""

Sums = dict[tuple[str, float, int | None], EntropySums]


@dataclass
class Measurements:
    """Everything that was measured of some arms."""

    arms: list[MeasuredArm] = field(default_factory=list)
    """By trunk: plain decoding, then the drafters."""
    costs: list[ArmCosts] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """How the trunk was held: dtype, device and the like."""
    served: Served | None = None
    """Measurements of a server."""


def assemble(
    found: Measurements, headline: Setting, settings: Mapping[str, Any], *, tasks_apart: bool = False
) -> Report:
    """Compute the report of some arms: their figures at every setting.

    Args:
        headline: The setting of the report's ``arms``; an arm that was not measured there has cells only.
        settings: How everything was measured. Figures measured with other settings are not comparable.
        tasks_apart: Whether there are cells of every task, besides those of all tasks together.
    """
    arms = [arm for arm in found.arms if arm.decoded.get(arm.own(headline))]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "platform": platform.platform()}
    return Report(
        arms={arm.name: make_cell(arm, arm.own(headline)).result for arm in arms},
        cells=tuple(cell for arm in found.arms for cell in make_cells(arm, tasks_apart=tasks_apart)),
        lossless=lossless(checked_records(found.arms)),
        settings={**settings, **found.facts, "threads": torch.get_num_threads(), **versions},
    )


def compared(report: Report, found: Measurements, title: str) -> Report:
    """Return the report of a study: with its comparisons, positions in the output, costs and server."""
    drafted = [arm for arm in found.arms if arm.head is not None]
    served, arms, cells = found.served, report.arms, report.cells
    if served is not None:
        arms, cells = {**arms, served.cells[0].arm: served.cells[0].result}, (*cells, *served.cells)
    return replace(
        report,
        title=title,
        arms=arms,
        cells=cells,
        comparisons=compare_arms(drafted),
        positions=tuple(one for arm in drafted for one in position_bins(arm)),
        costs=tuple(found.costs),
        endpoint=None if served is None else served.document,
    )


def compare_arms(arms: Sequence[MeasuredArm]) -> tuple[ArmComparison, ...]:
    """Return every pair of arms at every common setting with drafts, all tasks first, then each task.

    Arms are compared on the prompts that both decoded.
    """
    sums = {(arm.name, *key): EntropySums.of(rows, fine_edges()) for arm in arms for key, rows in arm.dense.items()}
    found = [
        comparison
        for first, second in combinations(arms, 2)
        for setting in first.decoded
        if setting.depth and setting in second.decoded
        for comparison in _compare(first, second, setting, sums)
    ]
    return _corrected(found)


def _compare(first: MeasuredArm, second: MeasuredArm, setting: Setting, sums: Sums) -> list[ArmComparison]:
    others = {one.prompt_id: one.counts(setting.depth) for one in second.decoded[setting]}
    pairs = [
        (one.task, one.counts(setting.depth), others[one.prompt_id])
        for one in first.decoded[setting]
        if one.prompt_id in others
    ]
    tasks = dict.fromkeys(task for task, _, _ in pairs)
    place = setting.temperature, setting.context_tokens
    dense = sums.get((first.name, *place)), sums.get((second.name, *place))
    compared = []
    for task in [None, *tasks] if pairs else []:
        chosen = [(mine, theirs) for its_task, mine, theirs in pairs if task in (None, its_task)]
        delta = tau_difference([mine for mine, _ in chosen], [theirs for _, theirs in chosen])
        at_equal = None if dense[0] is None or dense[1] is None else overlap_difference(dense[0], dense[1], task)
        compared.append(
            ArmComparison(
                **vars(setting),
                first=first.name,
                second=second.name,
                task=ALL_TASKS if task is None else task,
                delta_tau=delta.value,
                delta_tau_ci95=delta.ci95,
                groups=delta.groups,
                p_value=delta.p_value,
                same_trunk=first.trunk == second.trunk,
                delta_overlap_at_equal_entropy=None if at_equal is None else at_equal.value,
                delta_overlap_at_equal_entropy_ci95=None if at_equal is None else at_equal.ci95,
            )
        )
    return compared


def _corrected(found: Sequence[ArmComparison]) -> tuple[ArmComparison, ...]:
    """Set ``differs`` by Holm's correction, separately for all tasks together and for single tasks."""
    differs = [False] * len(found)
    for of_all in (True, False):
        family = [index for index, one in enumerate(found) if (one.task == ALL_TASKS) == of_all]
        falls = holm([found[index].p_value for index in family], LEVEL / 2)
        for index, fell in zip(family, falls, strict=True):
            differs[index] = fell
    return tuple(replace(one, differs=differs[index]) for index, one in enumerate(found))
