"""From what was decoded to the figures of a study's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtp_train.report.cells import Cell, EntropyBin, PositionBin
from mtp_train.report.schema import ArmResult
from mtp_train.study.dense import DenseRows
from mtp_train.study.records import Decoded, Setting


@dataclass(frozen=True, eq=False)
class MeasuredArm:
    """Everything that was measured of an arm."""

    name: str
    trunk: str
    """The frozen decoder, as the user named it."""
    head: str | None
    """What drafts; None for an arm of plain decoding."""
    decoded: Mapping[Setting, Sequence[Decoded]]
    """The arm's own settings, in the order they are shown, and the plain settings of its trunk."""
    dense: Mapping[tuple[float, int | None], DenseRows] = field(default_factory=dict)
    """By temperature and context; of as many depths as the deepest setting. Empty where what drafts has no q."""


def make_cells(arm: MeasuredArm) -> tuple[Cell, ...]:
    """Return a cell a setting and task, all tasks first; of plain decoding only for an arm without a head."""
    raise NotImplementedError


def arm_result(arm: MeasuredArm, setting: Setting) -> ArmResult:
    """Return what a report shows of the arm at one setting, all tasks together."""
    raise NotImplementedError


def position_bins(arm: MeasuredArm) -> tuple[PositionBin, ...]:
    """Return acceptance over stretches of the output, of settings with drafts and own context."""
    raise NotImplementedError


def entropy_bins(arm: MeasuredArm) -> tuple[EntropyBin, ...]:
    """Return overlap over the trunk's entropy, for every temperature, of prompts in their own context."""
    raise NotImplementedError
