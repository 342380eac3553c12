"""The report of what was measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

from mtp_train.report.cells import ArmCosts, Latency, StudyReport
from mtp_train.report.schema import ArmResult, Lossless
from mtp_train.study.advice import Flags, advise, break_even
from mtp_train.study.comparison import compare_arms
from mtp_train.study.endpoint import Served
from mtp_train.study.measure import Grid
from mtp_train.study.records import Decoded
from mtp_train.study.statistics import MeasuredArm, arm_result, entropy_bins, make_cells, position_bins


@dataclass
class Measured:
    """What was measured of all arms."""

    arms: list[MeasuredArm] = field(default_factory=list)
    costs: list[ArmCosts] = field(default_factory=list)
    latency: list[Latency] = field(default_factory=list)
    checked: list[Decoded] = field(default_factory=list)
    """Texts that had to equal plain decoding."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Dtype and device."""
    flags: dict[str, Flags] = field(default_factory=dict)
    """By arm, what each engine is to be given; arms that no engine serves are missing."""
    served: Served | None = None
    """What a server did, its answers compared with the trunk's; None where that trunk was not measured."""


def assemble(found: Measured, grid: Grid, title: str) -> StudyReport:
    """Compute every figure of a report."""
    drafted = [arm for arm in found.arms if arm.head is not None]
    cells = tuple(cell for arm in found.arms for cell in make_cells(arm))
    own = [cell for cell in cells if cell.context_tokens == grid.headline.context_tokens]
    return StudyReport(
        title=title,
        arms=_headline(found.arms, grid),
        cells=cells,
        comparisons=compare_arms(drafted),
        positions=tuple(one for arm in drafted for one in position_bins(arm)),
        entropy=tuple(one for arm in drafted for one in entropy_bins(arm)),
        costs=tuple(found.costs),
        latency=tuple(found.latency),
        break_even=break_even(own, found.costs),
        advice=tuple(one for arm in drafted for one in advise(own, arm.name, found.flags.get(arm.name, _no_flags))),
        lossless=_lossless(found.checked),
        gate=None,
        settings=_settings(found, grid),
    )


def _no_flags(depth: int) -> dict[str, str]:
    return {}


def _headline(arms: Sequence[MeasuredArm], grid: Grid) -> dict[str, ArmResult]:
    headline = grid.headline
    return {arm.name: arm_result(arm, headline if arm.head is not None else headline.plain) for arm in arms}


def _lossless(checked: Sequence[Decoded]) -> Lossless:
    verdicts = [one.same_as_plain for one in checked]
    return Lossless(
        checked=len(verdicts),
        identical=verdicts.count("identical"),
        near_tie_divergences=verdicts.count("near_tie"),
    )


def _settings(found: Measured, grid: Grid) -> dict[str, Any]:
    """Say how everything was measured; figures of other settings do not compare."""
    shown = asdict(grid)
    headline = grid.headline
    return {
        **{key: list(value) if isinstance(value, tuple) else value for key, value in shown.items()},
        "contexts": ["own" if one is None else one for one in grid.contexts],
        "headline": asdict(headline),
        **found.facts,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
    }
