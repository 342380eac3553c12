"""Arms against each other: differences paired by prompt, and which of them are real.

A report holds hundreds of comparisons, so 5 % of nothing would look like many findings. Holm's correction keeps the
chance of even one false finding among them all at 5 %. Half of it goes to the comparisons over all tasks and half to
those of single tasks: two families, so that the many tasks, with few prompts each, do not drown what all of them
together show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from mtp_train.acceptance_intervals import holm, tau_difference
from mtp_train.report.cells import ALL_TASKS, ArmComparison
from mtp_train.study.entropy import EntropySums, fine_edges, overlap_difference
from mtp_train.study.records import Setting
from mtp_train.study.statistics import MeasuredArm

LEVEL = 0.05
"""Chance of a false finding among all comparisons of a report."""

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
    """Say of each comparison whether its difference is real."""
    differs = [False] * len(found)
    for of_all in (True, False):
        family = [index for index, one in enumerate(found) if (one.task == ALL_TASKS) == of_all]
        falls = holm([found[index].p_value for index in family], LEVEL / 2)
        for index, fell in zip(family, falls, strict=True):
            differs[index] = fell
    return tuple(replace(one, differs=differs[index]) for index, one in enumerate(found))
