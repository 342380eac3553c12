"""The fields of ``report.json``, and how they are written and read.

A figure without a meaning (the acceptance of an arm that drafts nothing) is None here and null in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mtp_train.acceptance.counts import Interval
from mtp_train.acceptance.gate import GateSetting, GateVerdict
from mtp_train.acceptance.speed import Verdict, pays
from mtp_train.errors import DataError

# The report contains the gate's verdict unchanged.
GateResult = GateVerdict

REPORT_FILE = "report.json"
UNJUDGED = "unjudged"
"""Outcome of a run without a gate (`gate.enabled: false`), and ``settings.gate`` of its report."""
UNJUDGED_SENTENCE = (
    "Unjudged: gate.enabled is false, so nothing was measured, and the head may draft worse than the one before."
)
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherForced:
    """Teacher-forced metrics: taken at every position of the trunk's own plain output, without decoding."""

    dense: tuple[float | None, ...] | None
    """Per depth, share of positions where the head's argmax token is the trunk's."""
    overlap: tuple[float | None, ...] | None
    """Per depth, mean of sum_v min(p, q)."""
    target_entropy: float | None
    """Mean entropy of p, nats per token."""


NOT_TEACHER_FORCED = TeacherForced(dense=None, overlap=None, target_entropy=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """The figures of one arm; None where a figure has no meaning.

    In JSON and CSV the fields of :attr:`teacher_forced` are keys of the arm itself.
    """

    trunk: str
    """The trunk, as the user named it."""
    head: str | None
    """Where the head came from; None for plain decoding."""
    tau: float | None
    """Mean tokens committed per round, bonus token included."""
    tau_ci95: Interval | None
    """95 % interval of tau over groups of prompts."""
    acceptance_rate: float | None
    """Accepted over drafted tokens."""
    marginal: tuple[float, ...] | None
    """Per position, accepted over rounds."""
    conditional: tuple[float | None, ...] | None
    """Per position, accepted over accepted at the position before."""
    teacher_forced: TeacherForced
    repeated_8gram_share: float | None
    """Share of 8-grams that already occurred in the same output."""
    tokens_per_second: float | None
    """New tokens per second of decoding."""
    speedup: float | None
    """Tokens per second over those of the same trunk without drafts."""
    rounds: int | None
    """Decoding rounds, all prompts together."""
    prompts: int | None
    """Prompts decoded."""
    groups: int | None = None
    """Groups of the prompts, which :attr:`tau_ci95` leaves out one at a time. None where it was not recorded."""
    measured_here: bool
    """False for an arm that was measured elsewhere and is shown for comparison."""
    speedup_ci95: Interval | None = None
    """95 % interval of :attr:`speedup` over groups of prompts. None where it was not recorded."""
    break_even_tau: float | None = None
    """Tau at which this arm is as fast as plain decoding: the time of a round over that of a plain one, prefill
    excluded. None for plain decoding, and where it was not recorded."""

    @property
    def dense(self) -> tuple[float | None, ...] | None:
        """See :attr:`TeacherForced.dense`."""
        return self.teacher_forced.dense

    @property
    def overlap(self) -> tuple[float | None, ...] | None:
        """See :attr:`TeacherForced.overlap`."""
        return self.teacher_forced.overlap

    @property
    def target_entropy(self) -> float | None:
        """See :attr:`TeacherForced.target_entropy`."""
        return self.teacher_forced.target_entropy

    @property
    def pays(self) -> Verdict | None:
        """Whether drafts are shown to pay, at 95 % (``acceptance.speed.pays``); None where no speed was measured."""
        if self.head is None or self.speedup is None or (self.speedup_ci95 is None and self.break_even_tau is None):
            return None
        return pays(self.speedup, self.speedup_ci95, self.tau_ci95, self.break_even_tau)

    def to_json(self) -> dict[str, Any]:
        """Return the figures by the keys of :func:`json_keys`, in that order."""
        return {key: getattr(self, key) for key in json_keys(type(self))}

    @classmethod
    def from_json(cls, raw: object, where: str) -> ArmResult:
        """Read an arm from a report or from recorded arms; ``where`` is the start of error messages."""
        return build(cls, raw, where)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCell(ArmResult):
    """One arm at one setting."""

    arm: str
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    depth: int
    """Drafts a round."""
    rule: str
    """``greedy``, ``argmax`` or ``sampled`` (``evaluation.prompt_records.Rule``). In a study also ``none`` for plain
    decoding, and ``served`` for a server, which does not report its rule."""


AnyArm = TypeVar("AnyArm", bound=ArmResult)


def recommended(arms: Iterable[AnyArm]) -> AnyArm | None:
    """Return the figures to serve: the fastest of those whose drafts are shown to pay. None: serve without drafts."""
    paying = [arm for arm in arms if arm.pays == "above"]
    return max(paying, key=lambda arm: arm.speedup or 0.0, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lossless:
    """How many outputs of decoding with drafts were compared with plain decoding, and with what result."""

    checked: int
    """Outputs compared."""
    identical: int
    """Outputs equal token for token."""
    near_tie_divergences: int
    """Outputs whose first difference is a near tie of the trunk's two best tokens, which rounding decides."""
    noise: float | None = None
    """Largest error of a logit in plain decoding in the run's dtype, over the first differences; None without any."""

    @property
    def faults(self) -> int:
        """Outputs that differ at no near tie."""
        return self.checked - self.identical - self.near_tie_divergences


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleText:
    """A text that the retrained head drafted for, at the report's first setting."""

    prompt_id: str
    prompt: str
    """The end of the prompt."""
    pieces: tuple[tuple[str, bool], ...]
    """The text in pieces, each with True where it consists of accepted drafts and False where the trunk added it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The report of one run."""

    arms: Mapping[str, ArmResult]
    """Results by arm, in the order they are shown."""
    lossless: Lossless | None
    """None where the outputs were not compared."""
    gate: GateResult | None
    """None where there was no head to judge, or ``gate.enabled`` is false."""
    settings: Mapping[str, Any]
    """How it was measured: temperature, draft sampling, verify rule, depth, dtype, device, ..."""
    cells: tuple[RunCell, ...] = ()
    """The arms at every setting but the first, which :attr:`arms` shows."""
    depths: tuple[RunCell, ...] = ()
    """The retrained head at fewer drafts a round, on some of the prompts, at the first setting. Empty for a study: its
    cells contain every depth."""
    samples: tuple[SampleText, ...] = ()
    """Some texts of the retrained head, for the page."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values; a number that is not finite becomes None."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, raw: object, where: str) -> RunReport:
        """Read a report back; ``where`` is the start of error messages."""
        found = _require_fields(raw, cls, where)
        cells, depths = (
            tuple(build(RunCell, cell, f"{where}: {key}.{number}") for number, cell in enumerate(found[key]))
            for key in ("cells", "depths")
        )
        samples = tuple(
            build(SampleText, one, f"{where}: samples.{number}") for number, one in enumerate(found["samples"])
        )
        return cls(**cls._shared(found, where), cells=cells, depths=depths, samples=samples)

    @staticmethod
    def _shared(report: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Read the fields that every report has."""
        arms = _require_mapping(report["arms"], f"{where}: arms")
        lossless, gate = report["lossless"], report["gate"]
        return {
            "arms": {name: ArmResult.from_json(arm, f"{where}: arms.{name}") for name, arm in arms.items()},
            "lossless": None if lossless is None else build(Lossless, lossless, f"{where}: lossless"),
            "gate": None if gate is None else _gate(gate, f"{where}: gate"),
            "settings": _require_mapping(report["settings"], f"{where}: settings"),
        }


def load_report(path: Path) -> RunReport:
    """Read a ``report.json``.

    Raises:
        DataError: The file is missing, is not JSON, or is not a report.
    """
    return RunReport.from_json(read_report(path), str(path))


def read_report(path: Path) -> Any:
    """Read the JSON of a report.

    Raises:
        DataError: The file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; expected a report in JSON. Run the evaluation again.") from error


def json_keys(record: Any) -> list[str]:
    """Return the JSON keys of a record in order: its fields, ``teacher_forced`` replaced by its own fields."""
    names = [field.name for field in fields(record)]
    if "teacher_forced" not in names:
        return names
    place = names.index("teacher_forced")
    return [*names[:place], *_GROUPED, *names[place + 1 :]]


_GROUPED = tuple(field.name for field in fields(TeacherForced))


def _plain(value: Any) -> Any:
    if isinstance(value, ArmResult):
        return _plain(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _require_mapping(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: {type(raw).__name__}; expected an object. Run the evaluation again.")
    return raw


def _gate(raw: object, where: str) -> GateVerdict:
    found = _require_mapping(raw, where)
    settings = [
        build(GateSetting, setting, f"{where}.settings.{number}") for number, setting in enumerate(found["settings"])
    ]
    return replace(build(GateVerdict, {**found, "settings": []}, where), settings=tuple(settings))


def _require_fields(raw: object, record: Any, where: str) -> dict[str, Any]:
    """Return an object that has exactly the fields of a dataclass."""
    found = _require_mapping(raw, where)
    names = set(json_keys(record))
    odd = sorted(names ^ found.keys())
    if odd:
        raise DataError(
            f"{where}: fields missing or unknown: {', '.join(odd)}; expected exactly {', '.join(sorted(names))}. "
            "Read it with the version that wrote it."
        )
    return found


def build(record: type[Record], raw: object, where: str) -> Record:
    """Make a dataclass of a JSON object that has its keys and no others; lists become tuples, at any depth."""
    found = {key: _frozen(value) for key, value in _require_fields(raw, record, where).items()}
    if issubclass(record, ArmResult):
        found["teacher_forced"] = TeacherForced(**{key: found.pop(key) for key in _GROUPED})
    make: Callable[..., Record] = record
    return make(**found)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
