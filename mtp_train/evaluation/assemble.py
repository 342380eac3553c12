"""From the records of arms to their report: figures at every setting, and comparisons of arms."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
import transformers

from mtp_train.acceptance.gate import GateVerdict, decide_gate
from mtp_train.acceptance.intervals import holm, tau_difference
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import Pair
from mtp_train.errors import DataError
from mtp_train.evaluation.entropy import overlap_difference
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmComparison, Report
from mtp_train.evaluation.served import Served
from mtp_train.evaluation.statistics import (
    MeasuredArm,
    checked_records,
    lossless,
    make_cell,
    make_cells,
)

LEVEL = 0.05
"""Probability of any false finding among all comparisons of a report."""

LEAST_SAME_TEXTS = 0.5
"""Share of equal greedy texts below which two servers may not serve one trunk. Rounding alone changes fewer."""


@dataclass
class Measurements:
    """Everything that was measured of some arms."""

    arms: list[MeasuredArm] = field(default_factory=list)
    """By trunk: plain decoding, then the drafters."""
    facts: dict[str, Any] = field(default_factory=dict)
    """How the trunk was held: dtype, device and the like."""
    served: dict[str, Served] = field(default_factory=dict)
    """Measurements of servers, by arm."""


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
    """Return the report of a study: with its comparisons and servers.

    The second of two servers is judged against the first one.
    """
    drafted = [arm for arm in found.arms if arm.head is not None]
    served, documents = found.served.values(), {name: one.document for name, one in found.served.items()}
    return replace(
        report,
        title=title,
        arms={**report.arms, **{one.arm.name: one.cells[0].result for one in served}},
        cells=(*report.cells, *(cell for one in served for cell in one.cells)),
        comparisons=compare_arms(drafted, [one.arm for one in served]),
        gate=_gate(*served) if len(served) == 2 else None,
        endpoint=next(iter(documents.values())) if len(documents) == 1 else documents or None,
    )


def _gate(baseline: Served, judged: Served) -> GateVerdict:
    """Apply the gate to the head of a server, against another server on the same prompts.

    Raises:
        DataError: The judged server has no drafts, or those of single prompts are not known of both alike.
    """
    pairs, sources, first = {}, [one.document["counts"] for one in (baseline, judged)], baseline.arm
    for before, (setting, after) in zip(first.by_prompt.values(), judged.arm.by_prompt.items(), strict=True):
        both = [prompt for prompt in after if prompt in before]
        if not both or not setting.depth or sources[0] != sources[1]:
            found = " and ".join(sources) if both and setting.depth else "no drafts, or none that it counts by prompt"
            raise DataError(
                f"arm {judged.arm.name}: {found}; expected counts of one kind on prompts that both servers answer. "
                "Start llama-server with --spec-type draft-mtp (draft-eagle3 with -md), both with --metrics or neither."
            )
        counts = [after[prompt][1] for prompt in both], [before[prompt][1] for prompt in both]
        pairs[setting.name] = Pair(*counts, *counts)
    name = first.name if any(setting.depth for setting in first.decoded) else PLAIN
    verdict, same = decide_gate(pairs, name), same_texts(first, judged.arm)
    if same < LEAST_SAME_TEXTS:
        told = f"{verdict.reason}. Only {same:.0%} of the greedy texts are the same: do both serve one trunk?"
        verdict = replace(verdict, reason=told)
    return verdict


def same_texts(first: MeasuredArm, second: MeasuredArm) -> float:
    """Return the share of greedy texts that two arms both wrote; 1.0 without any."""

    def greedy_texts(arm: MeasuredArm) -> dict[str, tuple[int, ...]]:
        greedy = [records for setting, records in arm.decoded.items() if not setting.temperature]
        return {one.prompt_id: one.token_ids for records in greedy for one in records}

    texts, others = greedy_texts(first), greedy_texts(second)
    both = texts.keys() & others.keys()
    return sum(texts[prompt] == others[prompt] for prompt in both) / len(both) if both else 1.0


def compare_arms(arms: Sequence[MeasuredArm], servers: Sequence[MeasuredArm] = ()) -> tuple[ArmComparison, ...]:
    """Return every pair of arms at every common setting with drafts, all tasks first, then each task.

    Arms are compared on the prompts that both decoded; servers with servers.
    """
    pairs = [(*pair, pair[0].trunk == pair[1].trunk) for pair in combinations(arms, 2)]
    pairs += [(*pair, same_texts(*pair) >= LEAST_SAME_TEXTS) for pair in combinations(servers, 2)]
    return _corrected([row for first, second, same in pairs for row in _compare(first, second, same)])


def _compare(first: MeasuredArm, second: MeasuredArm, same_trunk: bool) -> list[ArmComparison]:
    compared, mine, theirs = [], first.by_prompt, second.by_prompt
    for setting in (one for one in mine if one.depth and one in theirs):
        others, place = theirs[setting], (setting.temperature, setting.context_tokens)
        pairs = [(task, one, others[prompt][1]) for prompt, (task, one) in mine[setting].items() if prompt in others]
        dense = first.dense.get(place), second.dense.get(place)
        for task in [None, *dict.fromkeys(task for task, _, _ in pairs)] if pairs else []:
            chosen = [(one, other) for its_task, one, other in pairs if task in (None, its_task)]
            delta = tau_difference([one for one, _ in chosen], [other for _, other in chosen])
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
                    same_trunk=same_trunk,
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
