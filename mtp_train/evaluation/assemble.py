"""Assemble a study's report: comparisons of arms, settings."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
import transformers

from mtp_train.acceptance.intervals import holm, tau_difference
from mtp_train.evaluation.cells import ALL_TASKS, ArmComparison, ArmCosts, StudyReport
from mtp_train.evaluation.entropy import EntropySums, fine_edges, overlap_difference
from mtp_train.evaluation.grid import Grid
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ArmResult
from mtp_train.evaluation.served import Served
from mtp_train.evaluation.statistics import (
    MeasuredArm,
    arm_result,
    checked_records,
    lossless,
    make_cells,
    position_bins,
)

LEVEL = 0.05
"""Probability of any false finding among all comparisons of a report."""

Sums = dict[tuple[str, float, int | None], EntropySums]


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
                first=first.name,
                second=second.name,
                task=ALL_TASKS if task is None else task,
                temperature=setting.temperature,
                context_tokens=setting.context_tokens,
                depth=setting.depth,
                rule=setting.rule,
                delta_tau=delta.value,
                delta_tau_ci95=delta.ci95,
                groups=delta.groups,
                p_value=delta.p_value,
                differs=False,
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


@dataclass
class Measured:
    """The measurements of all arms."""

    arms: list[MeasuredArm] = field(default_factory=list)
    costs: list[ArmCosts] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Dtype and device."""
    served: Served | None = None
    """Measurements of a server, its answers compared with the trunk's; None where that trunk was not measured."""


def assemble(found: Measured, grid: Grid, title: str) -> StudyReport:
    """Compute every figure of a report."""
    drafted = [arm for arm in found.arms if arm.head is not None]
    cells = tuple(cell for arm in found.arms for cell in make_cells(arm))
    return StudyReport(
        title=title,
        arms=_headline(found.arms, grid),
        cells=cells,
        comparisons=compare_arms(drafted),
        positions=tuple(one for arm in drafted for one in position_bins(arm)),
        costs=tuple(found.costs),
        lossless=lossless([record for arm in found.arms for record in checked_records([arm], arm.settings)]),
        gate=None,
        settings=_settings(found, grid),
    )


def _headline(arms: Sequence[MeasuredArm], grid: Grid) -> dict[str, ArmResult]:
    headline = grid.headline
    return {arm.name: arm_result(arm, arm.own(headline)) for arm in arms}


def _settings(found: Measured, grid: Grid) -> dict[str, Any]:
    """Return how everything was measured; figures measured with other settings are not comparable."""
    shown = asdict(grid)
    headline = grid.headline
    return {
        **{key: list(value) if isinstance(value, tuple) else value for key, value in shown.items()},
        "contexts": ["own" if one is None else one for one in grid.contexts],
        "headline": {key: getattr(headline, key) for key in ("temperature", "context_tokens", "depth", "rule")},
        **found.facts,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
    }
