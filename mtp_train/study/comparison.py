"""Arms against each other: differences paired by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_train.report.cells import ArmComparison
from mtp_train.study.statistics import MeasuredArm


def compare_arms(arms: Sequence[MeasuredArm]) -> tuple[ArmComparison, ...]:
    """Return every pair of arms at every common setting with drafts, all tasks first, then each task."""
    raise NotImplementedError
