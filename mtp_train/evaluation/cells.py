"""The fields of a study's ``report.json``: the fields of a run's report and the results over a grid of settings.

A figure without a meaning is None here and null in the file. Every interval is a 95 % interval over groups of
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mtp_train.acceptance.counts import Interval
from mtp_train.errors import DataError
from mtp_train.evaluation.results import RunCell, RunReport, build, read_report

ALL_TASKS = "all"
"""Task of a cell that pools all tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(RunCell):
    """One arm at one point of the grid."""

    task: str
    """:data:`ALL_TASKS` for all tasks together."""
    context_tokens: int | None
    """None: prompts as they are."""
    tau_macro: float | None
    """Mean over prompts of each prompt's tau. ``tau`` pools rounds, so that long texts have more weight."""
    accepted_histogram: tuple[int, ...] | None
    """Rounds that accepted exactly 0, 1, ... ``depth`` drafts."""
    draft_tokens: int
    accepted_tokens: int
    new_tokens: int
    """Tokens returned."""
    mean_prompt_tokens: float
    seconds_prefill: float | None
    """Mean prefill time per prompt."""
    round_seconds: float | None
    """Mean wall time of a round, which for plain decoding is one token."""
    break_even_acceptance: float | None
    """Conditional acceptance, equal at all positions, that results in :attr:`break_even_tau`; None where none does."""
    marginal_ci95: tuple[Interval | None, ...] | None = None
    """Interval of each entry of :attr:`marginal`."""


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
    """Two-sided p-value of no difference, before Holm's correction."""
    differs: bool
    """Whether the difference is significant at 5 % over all comparisons of the report (Holm's correction)."""
    same_trunk: bool
    """Whether both draft for the same trunk; otherwise texts and entropies differ too."""
    delta_overlap_at_equal_entropy: float | None
    """Difference of overlap at depth 1 at equal target entropy, which is positive for a better head and not for easier
    text."""
    delta_overlap_at_equal_entropy_ci95: Interval | None

    def swapped(self) -> ArmComparison:
        """Return the comparison with the arms exchanged."""
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
    """Return the interval of the negated difference."""
    return None if interval is None else (-interval[1], -interval[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Acceptance over a stretch of the output; all tasks, prompts as they are."""

    arm: str
    temperature: float
    depth: int
    rule: str
    start: int
    """Index of the first new token."""
    stop: int
    """Index after the last new token."""
    tau: float
    tau_ci95: Interval | None
    groups: int
    """Groups with outputs this long."""
    rounds: int
    """Rounds that began there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCosts:
    """Memory and prefill cost of a head, at any setting."""

    arm: str
    head_bytes: int
    """Weights of the head, without the embedding and output matrix that it shares with the trunk."""
    head_kv_bytes_per_token: int
    """Like :attr:`trunk_kv_bytes_per_token`, for the head; 0 also where the head has sliding-window attention."""
    trunk_kv_bytes_per_token: int
    """Bytes of the KV cache per token in the dtype that runs; for latent attention, of the latent."""
    trunk_state_bytes: int
    """Bytes per text at any length: recurrent states and full sliding windows."""
    context_tokens_lost: int | None
    """Tokens of the trunk's KV cache that fit into the memory of the head's weights; None where the trunk has no KV
    cache. The head's own KV cache takes a further share ``head_kv / (trunk_kv + head_kv)`` of the remaining tokens."""
    prefill_ratio: float | None
    """Prompt tokens per second with the head, divided by the same without."""
    prefill_tokens: int | None
    """Length of the prompt that prefill was timed on."""
    plain_prefill_tokens_per_second: float | None = None
    """Prompt tokens per second without the head, at that length."""


VERDICTS = {"good": "confirmed", "bad": "refuted", "neutral": "undecided"}
"""Verdict on a statement by the tone of its finding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A statement and the result of its test."""

    tone: str
    """A key of :data:`VERDICTS`; readers treat any other value as ``neutral``."""
    statement: str
    evidence: str
    """The figures and their intervals in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyReport(RunReport):
    """The report of ``evaluate``, ``compare`` or a study recipe. ``arms`` holds the headline setting, all tasks."""

    title: str
    cells: tuple[Cell, ...]
    comparisons: tuple[ArmComparison, ...] = ()
    positions: tuple[PositionBin, ...] = ()
    costs: tuple[ArmCosts, ...] = ()
    findings: tuple[Finding, ...] = ()
    endpoint: Mapping[str, Any] | None = None
    """Measurements of a served model, if there was one (``mtp_train.evaluation.served``)."""

    @classmethod
    def from_json(cls, raw: object, where: str) -> StudyReport:
        """Read a report back; ``where`` is the start of error messages."""
        names = {field.name for field in fields(cls)}
        if not isinstance(raw, dict) or raw.keys() | _MAY_LACK != names:
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


_MAY_LACK = {"depths", "samples"}
"""Fields that older reports lack; both are empty in a study."""
_ROWS: dict[str, type] = {
    "cells": Cell,
    "comparisons": ArmComparison,
    "positions": PositionBin,
    "costs": ArmCosts,
    "findings": Finding,
}


def load_study(path: Path) -> StudyReport:
    """Read the ``report.json`` of a study.

    Raises:
        DataError: The file is missing, is not JSON, or is not the report of a study.
    """
    return StudyReport.from_json(read_report(path), str(path))
