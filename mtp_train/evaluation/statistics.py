"""From the records of arms to their report: figures at every setting, and comparisons of arms.

A run, a study, ``evaluate``, ``compare`` and servers differ in their arms and settings only.

A drafter may propose fewer drafts than the depth, or none (an n-gram lookup). A position without a draft counts as not
accepted in every figure that is a share of rounds: ``tau`` is the mean number of tokens a round commits, ``marginal``
adds up to ``tau - 1``, ``conditional`` multiplies up to ``marginal``, and a round without drafts is a round that
accepted 0. Only ``acceptance_rate`` divides by the drafted tokens: it is high while ``tau`` is low where a drafter is
accurate and rarely drafts. vLLM's counters omit rounds without drafts, so that it reports a higher mean acceptance
length for such drafters. Where every round drafts, its figures equal these.

Acceptance is of prompts that were decoded in batches, the time of a round of a few of these prompts, decoded one at a
time; ``acceptance.speed`` computes speeds of both. ``speedup`` includes prefill, as for a user, and ``break_even_tau``
is the cost of rounds alone.

Shapes: K depths, N target positions, P prompts, G groups of prompts, B bins of entropy, X sets of prompts.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from mtp_inference import fault_of
from mtp_train.acceptance.counts import (
    FloatArray,
    PromptCounts,
    acceptance_rate,
    conditional,
    marginal,
    num_groups,
    repeated_ngram_share,
    tau,
)
from mtp_train.acceptance.gate import DEFAULT_RULE, GateRule, GateVerdict, decide_gate
from mtp_train.acceptance.intervals import (
    Difference,
    holm,
    judge_difference,
    marginal_intervals,
    tau_difference,
    tau_interval,
)
from mtp_train.acceptance.names import PLAIN
from mtp_train.acceptance.speed import Pair, break_even_tau, measured_speedup, round_seconds, tokens_per_second
from mtp_train.errors import DataError
from mtp_train.evaluation.dense import DenseRows
from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.results import ALL_TASKS, ArmComparison, Cell, Lossless, Report

LEVEL = 0.05
"""Probability of any false finding among all comparisons of a report."""

LEAST_SAME_TEXTS = 0.5
"""Share of equal greedy texts below which two servers may not serve one trunk. Rounding alone changes fewer."""
Figures = dict[str, Any]
"""Fields of a :class:`Cell`."""
Records = Mapping[Setting, Sequence[PromptRecord]]
"""Records of an arm by setting, in the order of the prompts."""


@dataclass(frozen=True, eq=False)
class MeasuredArm:
    """The records of an arm at its settings, in the order they are shown: with drafts, or plain ones."""

    name: str
    trunk: str
    head: str | None
    """The drafter; None for an arm of plain decoding."""
    decoded: Records
    """All prompts, decoded in batches: what was accepted, and the texts."""
    timed: Records = field(default_factory=dict)
    """The beginnings of some of the prompts, decoded one at a time: how long a round takes."""
    dense: Mapping[tuple[float, int | None], DenseRows] = field(default_factory=dict)
    """Teacher-forced metrics by temperature and context, of as many depths as the deepest setting. Empty for drafters
    without a distribution q."""

    plain: MeasuredArm | None = None
    """Plain decoding of its trunk, where it was measured; None for an arm of plain decoding."""

    @property
    def settings(self) -> list[Setting]:
        return [one for one, records in self.decoded.items() if records]

    def counts(self, setting: Setting, *, timed: bool = False) -> list[PromptCounts]:
        """Return the counts of every prompt, or of every timed one, at the arm's own setting."""
        # Plain decoding is the same beside all drafting arms.
        own = setting if self.head is not None else setting.plain
        return [one.counts(own.depth) for one in (self.timed if timed else self.decoded).get(own, ())]

    def against(self, other: MeasuredArm, setting: Setting) -> Pair:
        """Return the counts of this arm and of another one at a setting, on the prompts of both."""
        return Pair(
            *paired(self.counts(setting), other.counts(setting)),
            *paired(self.counts(setting, timed=True), other.counts(setting, timed=True)),
        )


def paired(
    first: Sequence[PromptCounts], second: Sequence[PromptCounts]
) -> tuple[list[PromptCounts], list[PromptCounts]]:
    """Return the counts of the prompts that both have, in the order of the first."""
    others = {one.prompt_id: one for one in second}
    common = [one for one in first if one.prompt_id in others]
    return common, [others[one.prompt_id] for one in common]


def lossless(arms: Iterable[MeasuredArm]) -> Lossless:
    """Return what the checks of all texts found; each arm is judged at each of its settings."""
    checks = {
        (arm, setting): [one.check for one in records if one.check is not None]
        for arm in arms
        for setting, records in arm.decoded.items()
    }
    found = [one for some in checks.values() for one in some]
    verdicts = Counter(one.verdict for one in found)
    faults = {lane: fault for lane, some in checks.items() if (fault := fault_of(some)) is not None}
    return Lossless(
        checked=len(found) - verdicts["plain"],
        identical=verdicts["identical"],
        near_tie_divergences=verdicts["near_tie"],
        sampled=verdicts["sampled"],
        noise=max((one.error or 0.0 for one in found if one.verdict == "plain"), default=None),
        faults=tuple(f"{arm.name}, {setting.name}: {fault}" for (arm, setting), fault in faults.items()),
    )


def make_cells(arm: MeasuredArm) -> tuple[Cell, ...]:
    """Return a cell per own setting, of all tasks together, and after it one per task if there are several."""
    return tuple(
        make_cell(arm, setting, task)
        for setting in arm.settings
        for task in _tasks(one.task for one in arm.decoded[setting])
    )


def _tasks(found: Iterable[str]) -> tuple[str, ...]:
    single = dict.fromkeys(found)
    if not single:
        return ()
    return (ALL_TASKS, *single) if len(single) > 1 else (ALL_TASKS,)


def make_cell(arm: MeasuredArm, setting: Setting, task: str = ALL_TASKS) -> Cell:
    """Return an arm's figures at one of its own settings, where it decoded, on one task or all."""
    decoded = [one for one in arm.decoded[setting] if task in (ALL_TASKS, one.task)]
    counts = [one.counts(setting.depth) for one in decoded]
    dense = arm.dense.get((setting.temperature, setting.context_tokens))
    return Cell(
        **vars(setting),
        arm=arm.name,
        task=task,
        trunk=arm.trunk,
        head=arm.head,
        tau=tau(counts),
        repeated_8gram_share=repeated_ngram_share(one.token_ids for one in decoded),
        rounds=sum(one.rounds for one in counts),
        prompts=len(decoded),
        groups=num_groups(counts),
        draft_tokens=sum(one.num_draft_tokens for one in counts),
        accepted_tokens=sum(one.num_accepted_tokens for one in counts),
        new_tokens=sum(one.new_tokens for one in counts),
        mean_prompt_tokens=fmean(one.prompt_tokens for one in decoded),
        **({} if dense is None else _dense_means(dense, setting.depth, task)),
        **(_draft_figures(counts) if setting.depth else {}),
        # Too few prompts are timed to tell tasks apart.
        **(_speed_figures(arm, setting) if task == ALL_TASKS else {}),
    )


def _draft_figures(counts: Sequence[PromptCounts]) -> Figures:
    return {
        "tau_ci95": tau_interval(counts),
        "acceptance_rate": acceptance_rate(counts),
        "marginal": tuple(marginal(counts)),
        "marginal_ci95": tuple(marginal_intervals(counts)),
        "conditional": tuple(conditional(counts)),
    }


def _speed_figures(arm: MeasuredArm, setting: Setting) -> Figures:
    """Return the figures of the timed prompts, and those beside plain decoding of the same prompts."""
    timed = arm.counts(setting, timed=True)
    speed = tokens_per_second(arm.counts(setting), timed)
    if speed is None:
        return {}
    found: Figures = {
        "tokens_per_second": speed,
        "seconds_prefill": fmean(one.seconds_prefill or 0.0 for one in timed),
        "round_seconds": round_seconds(timed),
        "speedup": None if setting.depth else 1.0,
    }
    if setting.depth and arm.plain is not None:
        found |= _figures_against_plain(arm.against(arm.plain, setting))
    return found


def _figures_against_plain(pair: Pair) -> Figures:
    gain = measured_speedup(pair)
    if gain is None:
        return {}
    return {
        "speedup": gain.value,
        "speedup_ci95": gain.interval(0.05),
        "break_even_tau": break_even_tau(pair.timed_head, pair.timed_baseline),
    }


def _dense_means(rows: DenseRows, depth: int, task: str) -> Figures:
    """Return the means of agreement, overlap and entropy over a task's positions."""
    of_task_P = np.array([task in (ALL_TASKS, prompt.task) for prompt in rows.prompts])
    valid_KN = rows.valid_KN & of_task_P[rows.prompt_N]

    def mean(values_N: NDArray[Any], valid_N: NDArray[np.bool_]) -> float | None:
        return float(values_N[valid_N].mean(dtype=np.float64)) if valid_N.any() else None

    agreed, overlap = (tuple(map(mean, values_KN[:depth], valid_KN)) for values_KN in (rows.agreed_KN, rows.overlap_KN))
    return {"dense": agreed or None, "overlap": overlap or None, "target_entropy": mean(rows.entropy_N, valid_KN[0])}


@dataclass(frozen=True, kw_only=True)
class Served:
    """The measurements of a served model."""

    arm: MeasuredArm
    cells: tuple[Cell, ...]
    """One cell per temperature for all tasks, followed by those of single tasks; the first is the headline."""
    document: dict[str, Any]
    """The server, request settings, throughput, failures, warnings and the verdict on the answers."""


def beside_plain(alike: Sequence[Served]) -> list[Served]:
    """Return servers of equal load with their speeds over that of the first one without drafts, if there is one."""
    plain = next((one.arm for one in alike if one.document["drafts"] is False), None)
    if plain is None:
        return [*alike]
    return [replace(one, cells=tuple(_beside(cell, one.arm, plain) for cell in one.cells)) for one in alike]


def _beside(cell: Cell, arm: MeasuredArm, plain: MeasuredArm) -> Cell:
    """Return a server's cell with its speed over that of another server; every prompt was timed."""
    if arm is plain:
        return replace(cell, speedup=1.0)

    def of_task(records: Sequence[PromptRecord], depth: int) -> list[PromptCounts]:
        return [one.counts(depth) for one in records if cell.task in (ALL_TASKS, one.task)]

    own, others = arm.decoded[cell.setting], plain.decoded.get(cell.setting.plain, ())
    counts = paired(of_task(own, cell.depth), of_task(others, 0))
    found = _figures_against_plain(Pair(*counts, *counts))
    if not cell.depth:
        # It does not draft, or its rounds are not known.
        found.pop("break_even_tau", None)
    return replace(cell, **found)


@dataclass
class Measurements:
    """Everything that was measured of some arms."""

    arms: list[MeasuredArm] = field(default_factory=list)
    """By trunk: plain decoding, then the drafters."""
    facts: dict[str, Any] = field(default_factory=dict)
    """How the trunk was held: dtype, device and the like."""
    served: dict[str, Served] = field(default_factory=dict)
    """Measurements of servers, by arm."""
    rule: GateRule = DEFAULT_RULE
    """Judges the second of two servers."""


def assemble(
    found: Measurements, headline: Setting, settings: Mapping[str, Any], *, title: str | None = None
) -> Report:
    """Compute the report of some arms and servers. The second of two servers is judged against the first one.

    Args:
        headline: The setting of the report's ``arms``; an arm that was not measured there has cells only.
        settings: How everything was measured. Figures measured with other settings are not comparable.
        title: What a study compares. Its report has the comparisons of all arms, and cells of every task besides those
            of all tasks together. None for a run.
    """
    drafted = [arm for arm in found.arms if arm.head is not None]
    documents = {name: one.document for name, one in found.served.items()}
    loads = [
        beside_plain([one for one in found.served.values() if one.document["concurrency"] == load])
        for load in dict.fromkeys(one["concurrency"] for one in documents.values())
    ]
    served = [one for alike in loads for one in alike]
    judged = loads[0] if loads else []
    cells = [cell for arm in found.arms for cell in make_cells(arm)]
    at_headline = [one for one in cells if one.task == ALL_TASKS and one.setting in (headline, headline.plain)]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "platform": platform.platform()}
    return Report(
        title=title,
        arms={cell.arm: cell.result for cell in (*at_headline, *(one.cells[0] for one in served))},
        cells=(*cells, *(cell for one in served for cell in one.cells)),
        comparisons=() if title is None else compare_arms(drafted, [[one.arm for one in alike] for alike in loads]),
        gate=_gate(found.rule, *judged) if len(judged) == 2 else None,
        lossless=lossless(found.arms),
        settings={**settings, **found.facts, "threads": torch.get_num_threads(), **versions},
        endpoint=next(iter(documents.values())) if len(documents) == 1 else documents or None,
    )


def _gate(rule: GateRule, baseline: Served, judged: Served) -> GateVerdict:
    """Apply the gate to the head of a server, against another server on the same prompts.

    Raises:
        DataError: The judged server has no drafts, or those of single prompts are not known of both alike.
    """
    pairs, sources, first = {}, [one.document["counts"] for one in (baseline, judged)], baseline.arm
    for before, after in zip(first.decoded, judged.arm.decoded, strict=True):
        counts = paired(judged.arm.counts(after), first.counts(before))
        is_known = bool(counts[0]) and after.depth > 0
        if not is_known or sources[0] != sources[1]:
            found = " and ".join(sources) if is_known else "no drafts, or none that it counts by prompt"
            raise DataError(
                f"arm {judged.arm.name}: {found}; expected counts of one kind on prompts that both servers answer. "
                "Start llama-server with --spec-type draft-mtp (draft-eagle3 with -md), both with --metrics or "
                "neither; ask vLLM for one answer at a time first: --concurrency 1 4."
            )
        pairs[after.name] = Pair(*counts, *counts)
    name = first.name if any(setting.depth for setting in first.decoded) else PLAIN
    verdict = decide_gate(pairs, name, rule.confidence, target_break_even=rule.break_even_tau)
    same = same_texts(first, judged.arm)
    if same < LEAST_SAME_TEXTS:
        verdict = replace(
            verdict,
            reason=f"{verdict.reason}. Only {same:.0%} of the greedy texts are the same: do both serve one trunk?",
        )
    return verdict


def same_texts(first: MeasuredArm, second: MeasuredArm) -> float:
    """Return the share of greedy texts that two arms both wrote; 1.0 without any."""

    def greedy_texts(arm: MeasuredArm) -> dict[str, tuple[int, ...]]:
        return {
            one.prompt_id: one.token_ids
            for setting, records in arm.decoded.items()
            if not setting.temperature
            for one in records
        }

    texts = greedy_texts(first)
    others = greedy_texts(second)
    both = texts.keys() & others.keys()
    return len(texts.items() & others.items()) / len(both) if both else 1.0


def compare_arms(
    arms: Sequence[MeasuredArm], servers: Sequence[Sequence[MeasuredArm]] = ()
) -> tuple[ArmComparison, ...]:
    """Return every pair of arms at every common setting with drafts, all tasks first, then each task.

    Arms are compared on the prompts that both decoded.

    Args:
        arms: Arms that were decoded here.
        servers: Servers that got as many requests at a time, for each such number. These are compared with each other,
            and those of the first number with ``arms`` too.
    """
    pairs = [(*pair, pair[0].trunk == pair[1].trunk) for pair in combinations(arms, 2)]
    served = [pair for alike in servers for pair in combinations(alike, 2)]
    served += [(one, server) for one in arms for server in (servers[0] if servers else ())]
    pairs += [(*pair, same_texts(*pair) >= LEAST_SAME_TEXTS) for pair in served]
    found = [row for first, second, same in pairs for row in _compare(first, second, same)]
    differs: dict[ArmComparison, bool] = {}
    # Holm's correction, separately for all tasks together and for single tasks.
    for of_all in (True, False):
        family = [one for one in found if (one.task == ALL_TASKS) == of_all]
        differs |= zip(family, holm([one.p_value for one in family], LEVEL / 2), strict=True)
    return tuple(replace(one, differs=differs[one]) for one in found)


def _compare(first: MeasuredArm, second: MeasuredArm, same_trunk: bool) -> Iterator[ArmComparison]:
    for setting in (one for one in first.decoded if one.depth and one in second.decoded):
        place = setting.temperature, setting.context_tokens
        task_of = {one.prompt_id: one.task for one in first.decoded[setting]}
        both = paired(first.counts(setting), second.counts(setting))
        dense = first.dense.get(place), second.dense.get(place)
        for task in _tasks(task_of[one.prompt_id] for one in both[0]):
            chosen = [pair for pair in zip(*both, strict=True) if task in (ALL_TASKS, task_of[pair[0].prompt_id])]
            delta = tau_difference(*zip(*chosen, strict=True))
            at_equal = None if dense[0] is None or dense[1] is None else overlap_difference(dense[0], dense[1], task)
            yield ArmComparison(
                **vars(setting),
                first=first.name,
                second=second.name,
                task=task,
                delta_tau=delta.value,
                delta_tau_ci95=delta.ci95,
                groups=delta.groups,
                p_value=delta.p_value,
                same_trunk=same_trunk,
                delta_overlap_at_equal_entropy=None if at_equal is None else at_equal.value,
                delta_overlap_at_equal_entropy_ci95=None if at_equal is None else at_equal.ci95,
            )


ENTROPY_EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Lower ends of the bins in nats; the last has no upper end."""
FINER = 4
"""Parts of each bin in the comparison. Within a wide bin, easier text still has the lower entropy."""
FINE_EDGES = (
    *(low + (high - low) * part / FINER for low, high in pairwise(ENTROPY_EDGES) for part in range(FINER)),
    ENTROPY_EDGES[-1],
)
"""Lower ends of the comparison's bins."""
MIN_COMMON_SHARE = 0.25
"""Minimum overlap of the arms' distributions over bins; arms with less in common are not compared."""


def overlap_difference(first: DenseRows, second: DenseRows, task: str = ALL_TASKS) -> Difference | None:
    """Return the difference of mean overlap at depth 1 at equal target entropy, on the prompts that both arms decoded.

    Fine-tuning changes the entropy of the trunk's text, and that moves acceptance more than the head does (Bebop,
    arXiv:2606.12370). Two arms are therefore compared within bins of the target's entropy, whose differences are
    averaged with weights ``a b / (a + b)``, as Mantel and Haenszel do (J. National Cancer Institute 22, 1959): a and b
    are the shares of the arms' positions that lie in the bin. For arms with the same distribution of entropies, the
    result is the ordinary difference of means.

    Returns:
        None where the distributions of the arms over bins overlap by less than ``MIN_COMMON_SHARE``.
    """
    theirs = {prompt.id for prompt in second.prompts}
    both = [one for one in first.prompts if one.id in theirs and task in (ALL_TASKS, one.task)]
    number_of = {group: number for number, group in enumerate(dict.fromkeys(one.group for one in both))}
    place_of = {one.id: number_of[one.group] for one in both}
    pair_G4B = np.concatenate([_sums(rows, place_of, len(number_of)) for rows in (first, second)], axis=1)
    total_4B = pair_G4B.sum(axis=0)
    if not total_4B[0].any() or not total_4B[2].any():
        return None
    coarse_4B = np.add.reduceat(total_4B[::2], np.arange(0, total_4B.shape[1], FINER), axis=1)
    if (coarse_4B / coarse_4B.sum(axis=1, keepdims=True)).min(axis=0).sum() < MIN_COMMON_SHARE:
        return None
    return judge_difference(
        float(_standardised(total_4B[None])[0]), _standardised(total_4B - pair_G4B), pair_G4B[:, ::2].sum(axis=-1)
    )


def _sums(rows: DenseRows, place_of: Mapping[str, int], groups: int) -> FloatArray:
    """Return counts and summed overlaps of the positions at depth 1, shape (G, 2, B), by the bins of ``FINE_EDGES``.

    Args:
        place_of: The indices of the groups of the prompts that count, by the ids of the prompts.
    """
    group_P = np.array([place_of.get(one.id, -1) for one in rows.prompts], dtype=np.int64)
    valid_N = rows.valid_KN[0]
    # Other prompts, at -1, are in no bin.
    place = group_P[rows.prompt_N[valid_N]], rows.entropy_N[valid_N]
    bins = np.arange(groups + 1), (*FINE_EDGES, np.inf)
    return np.stack(
        [np.histogram2d(*place, bins, weights=weight_N)[0] for weight_N in (None, rows.overlap_KN[0, valid_N])], axis=1
    )


def _standardised(sums_X4B: FloatArray) -> FloatArray:
    """Return the weighted mean of the bins' differences for each X; NaN if no bin has positions of both arms."""
    counts_X2B = sums_X4B[:, ::2]
    overlaps_X2B = sums_X4B[:, 1::2]
    with np.errstate(divide="ignore", invalid="ignore"):
        share_X2B = counts_X2B / counts_X2B.sum(axis=-1, keepdims=True)
        weight_XB = np.nan_to_num(share_X2B.prod(axis=1) / share_X2B.sum(axis=1))
        mean_X2B = np.nan_to_num(overlaps_X2B / counts_X2B)
        return (weight_XB * (mean_X2B[:, 0] - mean_X2B[:, 1])).sum(axis=-1) / weight_XB.sum(axis=-1)
