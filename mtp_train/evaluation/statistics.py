"""Compute the figures of a report from the records of decoding: pure functions, the same for runs and studies.

A drafter may propose fewer drafts than the depth, or none (an n-gram lookup). A position without a draft counts as not
accepted in every figure that is a share of rounds: ``tau`` is the mean number of tokens a round commits, ``marginal``
adds up to ``tau - 1``, ``conditional`` multiplies up to ``marginal``, and a round without drafts is a round that
accepted 0. Only ``acceptance_rate`` divides by the drafted tokens: it is high while ``tau`` is low where a drafter is
accurate and rarely drafts. vLLM's counters omit rounds without drafts, so that it reports a higher mean acceptance
length for such drafters. Where every round drafts, its figures equal these.

Speed: tokens per second are all returned tokens over all wall time, prefill included; the time of a round excludes
prefill. So ``speedup`` is what a user measures, and ``break_even_tau`` depends on the cost of rounds alone.

Whether drafts pay is decided by ``acceptance.speed.pays`` alone.

Shapes: K depths, N target positions, P prompts, G groups of prompts, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from mtp_train.acceptance.counts import (
    PromptCounts,
    acceptance_rate,
    conditional,
    marginal,
    num_groups,
    repeated_ngram_share,
    tau,
)
from mtp_train.acceptance.intervals import (
    marginal_intervals,
    pooled_tau_interval,
    sum_by_group,
    tau_interval,
)
from mtp_train.acceptance.speed import break_even_tau, speed_difference
from mtp_train.evaluation.cells import ALL_TASKS, Cell, PositionBin
from mtp_train.evaluation.dense import DenseRows
from mtp_train.evaluation.prompt_records import Decoded, Setting
from mtp_train.evaluation.results import NOT_TEACHER_FORCED, ArmResult, Lossless, RunCell, TeacherForced

POSITION_EDGES = (0, *(8 << doubling for doubling in range(24)))
"""First new token of each stretch of the output."""


@dataclass(frozen=True, eq=False)
class MeasuredArm:
    """The records of an arm."""

    name: str
    trunk: str
    """The trunk, as the user named it."""
    head: str | None
    """The drafter; None for an arm of plain decoding."""
    decoded: Mapping[Setting, Sequence[Decoded]]
    """The arm's own settings, in the order they are shown, and the plain settings of its trunk."""
    dense: Mapping[tuple[float, int | None], DenseRows] = field(default_factory=dict)
    """Teacher-forced metrics by temperature and context, of as many depths as the deepest setting. Empty for a run, and
    for drafters without a distribution q."""

    @property
    def settings(self) -> list[Setting]:
        """The arm's own settings: with drafts, or plain ones for an arm of plain decoding."""
        return [
            setting
            for setting, decoded in self.decoded.items()
            if decoded and (setting.depth > 0) == (self.head is not None)
        ]

    def own(self, setting: Setting) -> Setting:
        """Return the arm's setting beside drafting arms at ``setting``: plain decoding is the same for all of them."""
        return setting if self.head is not None else setting.plain

    def counts(self, setting: Setting) -> list[PromptCounts]:
        """Return the counts of every prompt at the arm's own setting."""
        own = self.own(setting)
        return [one.counts(own.depth) for one in self.decoded[own]]


def checked_records(arms: Iterable[MeasuredArm], settings: Iterable[Setting]) -> list[Decoded]:
    """Return the records that were compared with plain decoding, setting by setting."""
    arms = list(arms)
    return [
        record
        for setting in settings
        for arm in arms
        for record in arm.decoded.get(setting, ())
        if record.same_as_plain is not None
    ]


def lossless(checked: Sequence[Decoded]) -> Lossless:
    """Count the verdicts of compared records."""
    verdicts = [one.same_as_plain for one in checked]
    return Lossless(
        checked=len(verdicts),
        identical=verdicts.count("identical"),
        near_tie_divergences=verdicts.count("near_tie"),
        noise=max((one.noise for one in checked if one.noise is not None), default=None),
    )


class _Part(NamedTuple):
    """The records of an arm at one setting, of one task or (None) all."""

    arm: MeasuredArm
    setting: Setting
    task: str | None
    decoded: list[Decoded]
    counts: list[PromptCounts]


def make_cells(arm: MeasuredArm) -> tuple[Cell, ...]:
    """Return a cell per setting and task, all tasks first; of plain decoding only for an arm without a head."""
    return tuple(_cell(part) for setting in arm.settings for part in _parts(arm, setting))


def arm_result(arm: MeasuredArm, setting: Setting) -> ArmResult:
    """Return the arm's figures at one setting, all tasks together.

    Raises:
        ValueError: Nothing was decoded there.
    """
    if not arm.decoded[setting]:
        raise ValueError(f"{arm.name}, {setting.slug}: nothing was decoded; expected at least one prompt.")
    return _result(_parts(arm, setting)[0])


def run_cell(arm: MeasuredArm, setting: Setting) -> RunCell:
    """Return the cell of an arm in a run's report. The plain arm has one beside every setting with drafts."""
    own = arm.own(setting)
    return RunCell(
        **_shared(arm_result(arm, own)),
        arm=arm.name,
        temperature=setting.temperature,
        top_p=setting.top_p,
        top_k=setting.top_k,
        depth=own.depth,
        rule=setting.rule,
    )


def position_bins(arm: MeasuredArm) -> tuple[PositionBin, ...]:
    """Return acceptance over stretches of the output, at settings with drafts and prompts as they are.

    A round belongs to the stretch of its first token. Later stretches contain only prompts whose outputs are that long.
    """
    return tuple(
        found
        for setting in arm.settings
        if setting.depth and setting.context_tokens is None
        for found in _position_bins(arm, setting)
    )


def break_even_acceptance(needed_tau: float, depth: int) -> float | None:
    """Return the conditional acceptance a in 0..1 with ``1 + a + ... + a ** depth = needed_tau``.

    0.0 where a round with drafts costs no more than a plain one; None where even ``depth + 1`` tokens a round are too
    few.
    """
    if needed_tau > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(middle**power for power in range(depth + 1)) >= needed_tau
        low, high = (low, middle) if enough else (middle, high)
    return high if low else 0.0


def _parts(arm: MeasuredArm, setting: Setting) -> list[_Part]:
    """Return all prompts of a setting together, then the prompts of each task."""
    decoded = list(arm.decoded[setting])
    counts = [one.counts(setting.depth) for one in decoded]
    parts = [_Part(arm, setting, None, decoded, counts)]
    for task in dict.fromkeys(one.task for one in decoded):
        chosen = [index for index, one in enumerate(decoded) if one.task == task]
        parts.append(
            _Part(arm, setting, task, [decoded[index] for index in chosen], [counts[index] for index in chosen])
        )
    return parts


def _result(part: _Part) -> ArmResult:
    arm, setting, _, decoded, counts = part
    drafts = setting.depth > 0
    mine, plain = _beside_plain(part) if drafts else ([], [])
    gain = speed_difference(mine, plain)
    dense = arm.dense.get((setting.temperature, setting.context_tokens))
    found = NOT_TEACHER_FORCED if dense is None else _dense_means(dense, setting.depth, part.task)
    return ArmResult(
        trunk=arm.trunk,
        head=arm.head,
        tau=tau(counts),
        tau_ci95=tau_interval(counts) if drafts else None,
        acceptance_rate=acceptance_rate(counts),
        marginal=tuple(marginal(counts)) if drafts else None,
        conditional=tuple(conditional(counts)) if drafts else None,
        teacher_forced=found,
        repeated_8gram_share=repeated_ngram_share(one.token_ids for one in decoded),
        tokens_per_second=_tokens_per_second(decoded),
        speedup=_over_plain(part, _tokens_per_second),
        rounds=sum(count.rounds for count in counts),
        prompts=len(decoded),
        groups=num_groups(counts),
        measured_here=True,
        speedup_ci95=None if gain is None or gain.ci95 is None else (1.0 + gain.ci95[0], 1.0 + gain.ci95[1]),
        break_even_tau=break_even_tau(mine, plain),
    )


def _shared(result: ArmResult) -> dict[str, Any]:
    """Return the fields that a cell of the arm has too."""
    return {one.name: getattr(result, one.name) for one in fields(ArmResult)}


def _cell(part: _Part) -> Cell:
    _, setting, task, decoded, counts = part
    drafts = setting.depth > 0
    result = _result(part)
    break_even = result.break_even_tau
    return Cell(
        **_shared(result),
        arm=part.arm.name,
        task=ALL_TASKS if task is None else task,
        temperature=setting.temperature,
        top_p=setting.top_p,
        top_k=setting.top_k,
        context_tokens=setting.context_tokens,
        depth=setting.depth,
        rule=setting.rule,
        marginal_ci95=tuple(marginal_intervals(counts)) if drafts else None,
        tau_macro=_macro(counts),
        accepted_histogram=_histogram(decoded, setting.depth) if drafts else None,
        draft_tokens=sum(count.num_draft_tokens for count in counts),
        accepted_tokens=sum(count.num_accepted_tokens for count in counts),
        new_tokens=sum(count.new_tokens for count in counts),
        mean_prompt_tokens=_mean([float(one.prompt_tokens) for one in decoded]),
        seconds_prefill=_mean([one.seconds_prefill for one in decoded]),
        round_seconds=_round_seconds(decoded),
        break_even_acceptance=None if break_even is None else break_even_acceptance(break_even, setting.depth),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _macro(counts: Sequence[PromptCounts]) -> float | None:
    """Return the mean of each prompt's tau, without prompts that ended with their first token."""
    own = [tau([count]) for count in counts if count.rounds]
    return _mean(own) if own else None


def _histogram(decoded: Sequence[Decoded], depth: int) -> tuple[int, ...]:
    accepted = [number for one in decoded for number in one.accepted]
    return tuple(np.bincount(accepted, minlength=depth + 1).tolist()) if accepted else (0,) * (depth + 1)


def _tokens_per_second(decoded: Sequence[Decoded]) -> float | None:
    seconds = sum(one.seconds_prefill + one.seconds_decode for one in decoded)
    return sum(len(one.token_ids) for one in decoded) / seconds if seconds else None


def _round_seconds(decoded: Sequence[Decoded]) -> float | None:
    rounds = sum(len(one.accepted) for one in decoded)
    return sum(one.seconds_decode for one in decoded) / rounds if rounds else None


def _beside_plain(part: _Part) -> tuple[list[PromptCounts], list[PromptCounts]]:
    """Return the counts of the part and of plain decoding, on the prompts that both decoded."""
    plain = {one.prompt_id: one.counts(0) for one in part.arm.decoded.get(part.setting.plain, ())}
    mine = [one for one in part.counts if one.prompt_id in plain]
    return mine, [plain[one.prompt_id] for one in mine]


def _over_plain(part: _Part, figure: Callable[[Sequence[Decoded]], float | None]) -> float | None:
    """Return a figure divided by the same figure of plain decoding, on the prompts that both decoded."""
    plain = {one.prompt_id: one for one in part.arm.decoded.get(part.setting.plain, ())}
    mine = [one for one in part.decoded if one.prompt_id in plain]
    above, below = figure(mine), figure([plain[one.prompt_id] for one in mine])
    return above / below if above is not None and below else None


def _dense_means(rows: DenseRows, depth: int, task: str | None) -> TeacherForced:
    """Return the means of agreement, overlap and entropy over a task's positions."""
    of_task_P = np.ones(len(rows.tasks), dtype=np.bool_) if task is None else rows.tasks == task
    valid_KN = rows.valid_KN & of_task_P[rows.prompt_N]
    entropy = float(rows.entropy_N[valid_KN[0]].mean(dtype=np.float64)) if valid_KN[0].any() else None
    if not depth:
        return replace(NOT_TEACHER_FORCED, target_entropy=entropy)
    agreed, overlap = (
        tuple(
            float(values_N[valid_N].mean(dtype=np.float64)) if valid_N.any() else None
            for values_N, valid_N in zip(values_KN[:depth], valid_KN[:depth], strict=True)
        )
        for values_KN in (rows.agreed_KN, rows.overlap_KN)
    )
    return TeacherForced(dense=agreed, overlap=overlap, target_entropy=entropy)


def _position_bins(arm: MeasuredArm, setting: Setting) -> list[PositionBin]:
    decoded = arm.decoded[setting]
    # Before the first token of round r lie 1 + r + sum(accepted[:r]) new tokens.
    starts = [1 + np.cumsum([0, *(1 + accepted for accepted in one.accepted)])[:-1] for one in decoded]
    bins = [np.searchsorted(POSITION_EDGES, start_R, side="right") - 1 for start_R in starts]
    size = len(POSITION_EDGES)
    rounds_PB = np.array([np.bincount(bin_R, minlength=size) for bin_R in bins], dtype=np.float64)
    accepted_PB = np.array(
        [np.bincount(bin_R, one.accepted, minlength=size) for bin_R, one in zip(bins, decoded, strict=True)]
    )
    rounds_GB, accepted_GB = (sum_by_group(one, [d.group for d in decoded]) for one in (rounds_PB, accepted_PB))
    found = []
    for number in np.flatnonzero(rounds_GB.any(axis=0)).tolist():
        met_G = rounds_GB[:, number] > 0
        rounds_G, accepted_G = rounds_GB[met_G, number], accepted_GB[met_G, number]
        found.append(
            PositionBin(
                arm=arm.name,
                temperature=setting.temperature,
                depth=setting.depth,
                rule=setting.rule,
                start=POSITION_EDGES[number],
                stop=POSITION_EDGES[number + 1],
                tau=1.0 + float(accepted_G.sum() / rounds_G.sum()),
                tau_ci95=pooled_tau_interval(accepted_G, rounds_G, setting.depth),
                groups=len(rounds_G),
                rounds=int(rounds_G.sum()),
            )
        )
    return found
