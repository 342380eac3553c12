"""The fields of ``report.json``, and how they are written and read: one report of runs, evaluations and studies.

A figure without a meaning (the acceptance of an arm that drafts nothing) is None here and null in the file. Every
interval is a 95 % interval over groups of prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.gate import GateVerdict
from mtp_train.acceptance.speed import Verdict, side
from mtp_train.errors import DataError
from mtp_train.evaluation.prompt_records import Exact, Setting

REPORT_FILE = "report.json"
UNJUDGED = "unjudged"
"""Outcome of a run without a gate (`gate.enabled: false`), and ``settings.gate`` of its report."""
UNJUDGED_SENTENCE = (
    "Unjudged: gate.enabled is false, so nothing was measured, and the head may draft worse than the one before."
)
ALL_TASKS = "all"
"""Task of a cell that pools all tasks."""
VERDICTS = {"good": "confirmed", "bad": "refuted", "neutral": "undecided"}
"""Verdict on a statement by the tone of its finding."""
RULE_ORDER = ("greedy", "sampled", "argmax")
"""Verify rules in the order that tables show them; the rule of a server comes last."""
Tone = Literal["good", "bad", "neutral"]
Shares = tuple[float | None, ...]
"""Shares by position; None where nothing was counted."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ArmResult(Exact):
    """The figures of one arm; None where a figure has no meaning or was not measured.

    Rounds are of all prompts, decoded in batches. Times of a round are of some of them, decoded one at a time.
    """

    trunk: str
    """The trunk, as the user named it."""
    head: str | None
    """Where the head came from; None for plain decoding."""
    tau: float | None = None
    """Mean tokens committed per round, bonus token included."""
    tau_ci95: Interval | None = None
    acceptance_rate: float | None = None
    """Accepted over drafted tokens."""
    marginal: tuple[float, ...] | None = None
    """Per position, accepted over rounds."""
    marginal_ci95: tuple[Interval | None, ...] | None = None
    conditional: Shares | None = None
    """Per position, accepted over accepted at the position before."""
    dense: Shares | None = None
    """Per depth, share of positions of the trunk's plain output where the head's argmax token is the trunk's."""
    overlap: Shares | None = None
    """Per depth, mean of sum_v min(p, q) over these positions."""
    target_entropy: float | None = None
    """Mean entropy of p over these positions, nats per token."""
    repeated_8gram_share: float | None = None
    """Share of 8-grams that already occurred in the same output."""
    tokens_per_second: float | None = None
    """New tokens over the time of the prefill and the rounds of their texts."""
    speedup: float | None = None
    """Tokens per second over those of the same trunk without drafts."""
    speedup_ci95: Interval | None = None
    break_even_tau: float | None = None
    """Tau at which this arm is as fast as plain decoding: the time of a round over that of a plain one, prefill
    excluded, except of servers that do not time it. None for plain decoding."""
    rounds: int | None = None
    """Decoding rounds, all prompts together."""
    prompts: int | None = None
    groups: int | None = None
    """Groups of the prompts, which :attr:`tau_ci95` leaves out one at a time."""
    measured_here: bool = True
    """False for an arm that was measured elsewhere and is shown for comparison."""

    @property
    def pays(self) -> Verdict | None:
        """Where the 95 % interval of the speedup lies: above 1, below it, or neither; None without an interval."""
        return None if self.head is None or self.speedup_ci95 is None else side(self.speedup_ci95, 1.0)


@dataclass(frozen=True, kw_only=True)
class Cell(ArmResult, Setting):
    """One arm at one setting, on one task or all."""

    arm: str
    task: str = ALL_TASKS
    """:data:`ALL_TASKS` for all tasks together."""
    draft_tokens: int
    accepted_tokens: int
    new_tokens: int
    mean_prompt_tokens: float
    seconds_prefill: float | None = None
    """Mean prefill time per prompt."""
    round_seconds: float | None = None
    """Mean wall time of a round, which for plain decoding is one token."""

    @property
    def result(self) -> ArmResult:
        return ArmResult(**{field.name: getattr(self, field.name) for field in fields(ArmResult)})


AnyArm = TypeVar("AnyArm", bound=ArmResult)


def recommended(arms: Iterable[AnyArm]) -> AnyArm | None:
    """Return the figures to serve: the fastest of those whose drafts are shown to pay. None: serve without drafts."""
    return max((arm for arm in arms if arm.pays == "above"), key=lambda arm: arm.speedup or 0.0, default=None)


@dataclass(frozen=True, kw_only=True)
class ArmComparison(Exact, Setting):
    """Two arms at one setting, paired by prompt."""

    first: str
    second: str
    task: str
    delta_tau: float
    """tau(first) - tau(second)."""
    delta_tau_ci95: Interval | None
    groups: int
    """Groups of prompts that the intervals leave out one at a time."""
    p_value: float | None
    """Two-sided p-value of no difference, before Holm's correction."""
    differs: bool = False
    """Whether the difference is significant at 5 % over all comparisons of the report (Holm's correction)."""
    same_trunk: bool
    """Whether both draft for the same trunk; otherwise texts and entropies differ too."""
    delta_overlap_at_equal_entropy: float | None = None
    """Difference of overlap at depth 1 at equal target entropy, which is positive for a better head and not for easier
    text."""
    delta_overlap_at_equal_entropy_ci95: Interval | None = None

    def swapped(self) -> ArmComparison:
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
    return None if interval is None else (-interval[1], -interval[0])


@dataclass(frozen=True)
class Finding:
    """A statement and the result of its test."""

    tone: Tone
    statement: str
    evidence: str
    """The figures and their intervals in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """How many outputs of decoding with drafts were checked, and with what result (``mtp_inference.lossless``)."""

    checked: int
    identical: int
    near_tie_divergences: int
    """Outputs whose first difference from plain decoding is a near tie, which rounding decides."""
    sampled: int = 0
    """Outputs whose drafts were sampled. Every token is the one that the rule gives, with other noise than plain
    decoding's."""
    noise: float | None = None
    """Largest error of the logit of a contender for a new token, in plain decoding in the run's dtype; None if nothing
    was decoded."""
    faults: tuple[str, ...] = ()
    """What is wrong with the decoder, by arm and setting."""


@dataclass(frozen=True, kw_only=True)
class SampleText:
    """A text that heads drafted for, at the report's first setting."""

    prompt_id: str
    prompt: str
    pieces: tuple[tuple[str, bool], ...]
    """The text in pieces, each with True where it consists of accepted drafts of the retrained head and False where the
    trunk added it."""
    before: tuple[tuple[str, bool], ...] = ()
    """The same with the head that the gate compares with; empty without one."""


@dataclass(frozen=True, kw_only=True)
class Report(Exact):
    """Measurements of a run, an evaluation or a study.

    A grid may have thousands of cells. Pages and tables show the headline setting, and one line through it along each
    axis (:meth:`along`).
    """

    title: str | None = None
    """What was compared; None for a run, which judges one head."""
    arms: Mapping[str, ArmResult]
    """Results by arm, all tasks together, at the headline setting, in the order they are shown."""
    lossless: Lossless | None = None
    """None where the outputs were not compared."""
    gate: GateVerdict | None = None
    """None where there was no head to judge, or ``gate.enabled`` is false."""
    settings: Mapping[str, Any]
    """How it was measured: temperature, draft sampling, verify rule, depth, dtype, device, ..."""
    cells: tuple[Cell, ...] = ()
    """Every arm at every setting; tasks apart where there are several."""
    comparisons: tuple[ArmComparison, ...] = ()
    findings: tuple[Finding, ...] = ()
    endpoint: Mapping[str, Any] | None = None
    """Measurements of a served model, if there was one (``mtp_train.evaluation.served``)."""
    samples: tuple[SampleText, ...] = ()
    """Some texts of the retrained head of a run, for the page."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the decoder; acceptance has no meaning then."""
        return () if self.lossless is None else self.lossless.faults

    @cached_property
    def by_place(self) -> dict[tuple[str, str, Setting], Cell]:
        """The cells of drafting arms by arm, task and setting."""
        return {(cell.arm, cell.task, cell.setting): cell for cell in self.cells if cell.rule != "none"}

    @cached_property
    def headline(self) -> Setting | None:
        """The setting of :attr:`arms`; None where no arm drafts."""
        stated = self.settings.get("headline")
        headline = None if stated is None else Setting(**stated)
        measured = [setting for _, task, setting in self.by_place if task == ALL_TASKS]
        # A server is measured with its own number of drafts.
        return headline if headline in measured else next(iter(measured), None)

    @property
    def drafting(self) -> tuple[str, ...]:
        """Arms that draft, in the order of :attr:`arms`."""
        names = [arm for arm, _, _ in self.by_place]
        return tuple(sorted(dict.fromkeys(names), key=[*self.arms, *names].index))

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.task for cell in self.cells if cell.task != ALL_TASKS))

    def at(self, setting: Setting | None, task: str = ALL_TASKS) -> dict[str, Cell]:
        """Return the cells of drafting arms at a setting, by arm; arms without it are left out."""
        return {
            arm: cell
            for arm in self.drafting
            if setting is not None and (cell := self.by_place.get((arm, task, setting))) is not None
        }

    def along(self, *axes: str) -> list[Setting]:
        """Return the settings with drafts that differ from the headline in these fields at most, in order."""
        headline = self.headline
        if headline is None:
            return []
        of_headline = {name: getattr(headline, name) for name in axes}
        every = {setting for _, task, setting in self.by_place if task == ALL_TASKS}
        return sorted(
            (setting for setting in every if replace(setting, **of_headline) == headline),
            key=lambda one: (
                *(one.context_tokens or 0, one.depth, one.temperature),
                *((*RULE_ORDER, one.rule).index(one.rule), -one.top_p, one.top_k),
            ),
        )

    def by_depth(self, arm: str) -> dict[int, Cell]:
        """Return an arm's cells by number of drafts, at the headline's temperature, context and rule."""
        return {cells[arm].depth: cells[arm] for cells in map(self.at, self.along("depth")) if arm in cells}

    @property
    def compared(self) -> list[ArmComparison]:
        """The comparisons over all tasks at the headline setting."""
        return [row for row in self.comparisons if row.setting == self.headline and row.task == ALL_TASKS]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values; a number that is not finite becomes None."""
        return json.loads(_reader(type(self)).dump_json(self))


_reader: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read_record(record: type[T], raw: str | bytes | Mapping[str, Any], where: str) -> T:
    """Make a record of this module, or another dataclass, of JSON text or of values that were read from it.

    Raises:
        DataError: A field is missing, unknown or of another type; ``where`` is the start of the message.
    """
    reader = _reader(record)
    try:
        return reader.validate_json(raw) if isinstance(raw, str | bytes) else reader.validate_python(raw)
    except ValidationError as error:
        named = [f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {one['msg']}" for one in error.errors()[:3]]
        raise DataError(
            f"{where}: {'; '.join(named)}; expected the fields of this version. Read it with the version that wrote "
            "it, or measure again."
        ) from error


def load_report(path: Path) -> Report:
    """Read a ``report.json``.

    Raises:
        DataError: The file is missing, is not JSON, or is not a report.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error}; expected a report in JSON. Run the evaluation again.") from error
    return read_record(Report, raw, str(path))
