"""The fields of a study's ``report.json``: those of a run's report, and what a grid of settings adds to them.

A figure without a meaning is None here and null in the file. Every interval is a 95 % interval over groups of
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtp_train.acceptance import Interval
from mtp_train.errors import DataError
from mtp_train.report.schema import RunCell, RunReport, build, read_report

ALL_TASKS = "all"
"""The task of a cell that pools all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(RunCell):
    """One arm at one point of the grid."""

    task: str
    """:data:`ALL_TASKS` for all together."""
    context_tokens: int | None
    """None: prompts as they are."""
    tau_macro: float | None
    """Mean over prompts of each prompt's own tau; ``tau`` pools rounds, so that long texts weigh more."""
    accepted_histogram: tuple[int, ...] | None
    """Rounds that accepted exactly 0, 1, ... ``depth`` drafts."""
    draft_tokens: int
    accepted_tokens: int
    new_tokens: int
    """Tokens returned."""
    mean_prompt_tokens: float
    seconds_prefill: float | None
    """Mean per prompt."""
    round_seconds: float | None
    """Mean wall time of a round; of plain decoding, of one token."""
    break_even_tau: float | None
    """Tau at which this arm is as fast as plain decoding: the ratio of their ``round_seconds``."""
    break_even_acceptance: float | None
    """Conditional acceptance, the same at each position, that gives :attr:`break_even_tau`; None where none does."""
    marginal_ci95: tuple[Interval | None, ...] | None = None
    """Of each entry of :attr:`marginal`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmComparison:
    """Two arms at one point of the grid, paired by prompt, with intervals over groups of prompts."""

    first: str
    second: str
    task: str
    temperature: float
    context_tokens: int | None
    depth: int
    rule: str
    delta_tau: float
    """tau(first) - tau(second)."""
    delta_tau_ci95: Interval | None
    groups: int
    """Groups of prompts that the intervals leave out one at a time."""
    p_value: float | None
    """Two-sided, of no difference; before the correction for many comparisons."""
    differs: bool
    """Whether the difference is real, at 5 % over all comparisons of the report (Holm's correction)."""
    same_trunk: bool
    """Whether both draft for the same trunk; otherwise texts and entropies differ too."""
    delta_overlap_at_equal_entropy: float | None
    """Difference of overlap at depth 1 where both meet the same target entropies; says whether the head is better, not
    only its text easier."""
    delta_overlap_at_equal_entropy_ci95: Interval | None

    def swapped(self) -> ArmComparison:
        """Return the same seen from the other arm."""
        overlap = self.delta_overlap_at_equal_entropy
        return replace(
            self,
            first=self.second,
            second=self.first,
            delta_tau=-self.delta_tau,
            delta_tau_ci95=negated(self.delta_tau_ci95),
            delta_overlap_at_equal_entropy=None if overlap is None else -overlap,
            delta_overlap_at_equal_entropy_ci95=negated(self.delta_overlap_at_equal_entropy_ci95),
        )


def negated(interval: Interval | None) -> Interval | None:
    """Return the interval of a difference the other way round."""
    return None if interval is None else (-interval[1], -interval[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Acceptance over a stretch of the output; all tasks, own context."""

    arm: str
    temperature: float
    depth: int
    rule: str
    start: int
    """First new token, counted from 0."""
    stop: int
    """Behind the last."""
    tau: float
    tau_ci95: Interval | None
    groups: int
    """Groups whose outputs reach it."""
    rounds: int
    """Rounds that began there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBin:
    """Overlap of p and q at depth 1 among positions of like target entropy; all tasks, own context."""

    arm: str
    temperature: float
    low_nats: float
    high_nats: float | None
    """None: no limit."""
    overlap: float | None
    overlap_ci95: Interval | None
    groups: int
    """Groups that have such positions."""
    share: float
    """Of the arm's positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """A reply of a length, with and without drafts, prefill included."""

    arm: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    plain_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCosts:
    """What a head costs, wherever it drafts."""

    arm: str
    head_bytes: int
    """Weights of the head, without the embedding and output matrix that it shares with the trunk."""
    head_kv_bytes_per_token: int
    """As of :attr:`trunk_kv_bytes_per_token`; 0 too where the head sees a sliding window."""
    trunk_kv_bytes_per_token: int
    """Keys and values that grow with the text, in the dtype that runs; of latent attention the latent."""
    trunk_state_bytes: int
    """What one text takes whatever its length: recurrent states, and sliding windows once full."""
    context_tokens_lost: int | None
    """Tokens of the trunk's KV cache that the head's weights take the room of; None where the trunk keeps no KV. Of the
    tokens that are left, the head's own KV takes the room of ``head_kv / (trunk_kv + head_kv)``."""
    prefill_ratio: float | None
    """Prompt tokens per second with the head over without."""
    prefill_tokens: int | None
    """Length of the prompt that it was measured on."""
    plain_prefill_tokens_per_second: float | None = None
    """Without the head, at that length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """From which output length on drafts pay, for one prompt length."""

    arm: str
    task: str
    temperature: float
    depth: int
    prompt_tokens: int
    output_tokens: int | None
    """0: from the first token on; None: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to serve a task with."""

    arm: str
    task: str
    temperature: float
    depth: int
    """0: without drafts."""
    speedup: float
    """Measured at that depth, over plain decoding in the same decoder; 1.0 at depth 0."""
    reason: str
    flags: Mapping[str, str]
    """Engine to its exact flags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftPoint:
    """An untouched head on a trunk that was fine-tuned for so long."""

    label: str
    """The checkpoint, or the step."""
    step: int | None
    tokens: int | None
    """Tokens fine-tuned on."""
    trunk_change: float | None
    """Relative change of the trunk's weights, ``|W - W0| / |W0|``."""
    tau: float
    tau_ci95: Interval | None
    groups: int | None
    """Groups of the prompts."""
    overlap: float | None
    target_entropy: float | None


VERDICTS = {"good": "confirmed", "bad": "refuted", "neutral": "undecided"}
"""What the tone of a finding says of its statement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A statement that was put to the test."""

    tone: str
    """One of :data:`VERDICTS`; a reader takes any other for ``neutral``."""
    statement: str
    evidence: str
    """The figures and their intervals, one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport(RunReport):
    """The report of ``evaluate``, ``compare`` or a study recipe. ``arms`` holds the headline setting, all tasks."""

    title: str
    cells: tuple[Cell, ...]
    comparisons: tuple[ArmComparison, ...] = ()
    positions: tuple[PositionBin, ...] = ()
    entropy: tuple[EntropyBin, ...] = ()
    costs: tuple[ArmCosts, ...] = ()
    latency: tuple[Latency, ...] = ()
    break_even: tuple[BreakEven, ...] = ()
    advice: tuple[Advice, ...] = ()
    drift: tuple[DriftPoint, ...] = ()
    findings: tuple[Finding, ...] = ()
    endpoint: Mapping[str, Any] | None = None
    """What a served model was found to do, where one was asked (``mtp_train.study.endpoint``)."""

    @classmethod
    def from_json(cls, raw: object, where: str) -> StudyReport:
        """Read a report back; ``where`` opens the error messages."""
        names = {field.name for field in fields(cls)}
        if not isinstance(raw, dict) or raw.keys() != names:
            raise DataError(
                f"{where}: not the report of a study; expected exactly the fields {', '.join(sorted(names))}. Read it "
                "with the version that wrote it."
            )
        rows: dict[str, tuple[Any, ...]] = {
            name: tuple(build(record, row, f"{where}: {name}.{number}") for number, row in enumerate(raw[name]))
            for name, record in _ROWS.items()
        }
        make: Callable[..., StudyReport] = cls
        return make(**cls._shared(raw, where), **rows, title=raw["title"], endpoint=raw["endpoint"])


_ROWS: dict[str, type] = {
    "cells": Cell,
    "comparisons": ArmComparison,
    "positions": PositionBin,
    "entropy": EntropyBin,
    "costs": ArmCosts,
    "latency": Latency,
    "break_even": BreakEven,
    "advice": Advice,
    "drift": DriftPoint,
    "findings": Finding,
}


def load_study(path: Path) -> StudyReport:
    """Read the ``report.json`` of a study.

    Raises:
        DataError: The file is missing, is not JSON, or is not the report of a study.
    """
    return StudyReport.from_json(read_report(path), str(path))
