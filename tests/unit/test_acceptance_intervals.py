"""Intervals over groups: whole groups move together, and their number is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from mtp_train.acceptance.counts import PromptCounts, tau
from mtp_train.acceptance.intervals import (
    Spread,
    marginal_intervals,
    t_quantile,
    tau_difference,
    tau_interval,
)


def counts(prompt_id: str, rounds: int, *accepted: int, group: str | None = None) -> PromptCounts:
    committed = 1 + rounds + sum(accepted)
    return PromptCounts(prompt_id, rounds, rounds * len(accepted), accepted, committed, group or prompt_id)


def decoded(shares: np.ndarray, seed: int, groups: Sequence[str] = ()) -> list[PromptCounts]:
    """Simulate prompts whose rounds accept each next draft with the prompt's own chance."""
    rng = np.random.default_rng(seed)
    result = []
    for i, share in enumerate(shares):
        lengths = rng.geometric(1.0 - share, size=40) - 1
        accepted = (int((lengths > pos).sum()) for pos in range(3))
        result.append(counts(f"p{i}", 40, *accepted, group=groups[i] if groups else None))
    return result


def difficulty(num_prompts: int) -> np.ndarray:
    return np.random.default_rng(7).uniform(0.2, 0.8, size=num_prompts)


def width(interval: tuple[float, float] | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


def alone(prompts: Sequence[PromptCounts]) -> list[PromptCounts]:
    """Return the same prompts, each in a group of its own: the wrong statistic for correlated prompts."""
    return [dataclasses.replace(one, group=one.prompt_id) for one in prompts]


def test_one_group_has_no_interval_however_many_prompts() -> None:
    one = decoded(difficulty(8), seed=1, groups=["g"] * 8)
    assert tau_interval(one) is None
    assert marginal_intervals(one) == [None] * 3
    assert tau_difference(one, one).ci95 is None
    assert tau_interval(alone(one)) is not None


def test_no_rounds_have_no_interval() -> None:
    assert tau_interval([counts("a", 0), counts("b", 0)]) is None


def test_interval_of_a_mean_is_students() -> None:
    """With one round each, tau is a mean: its interval is mean +- t * s / sqrt(n); t = 2.262 for 10 groups."""
    accepted = [0, 3, 1, 2, 2, 1, 3, 0, 2, 1]
    prompts = [counts(f"p{i}", 1, *(int(length > pos) for pos in range(3))) for i, length in enumerate(accepted)]
    half = 2.262 * float(np.std(accepted, ddof=1)) / math.sqrt(10)
    assert tau_interval(prompts) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-3)


def test_degrees_of_freedom_are_of_the_effective_number_of_groups() -> None:
    """By Kish, 40 rounds and six times 10 count as 100^2 / 2200 = 4.5 groups."""
    long, equal = ([counts(f"p{i}", rounds, i) for i, rounds in enumerate((first, *[10] * 6))] for first in (40, 10))
    spreads = [tau_difference(*arms).spread for arms in ((long, long), (equal, equal), (long, equal), (equal, long))]
    # Of two arms the mean share counts: (0.4 + 1/7) / 2, and six times (0.1 + 1/7) / 2, are 6.2 groups.
    assert [spread and spread.freedom for spread in spreads] == [3, 6, 5, 5]
    # 21 of 100 drafts; without a group 21 of 60, or 21 - i of 90. t = 3.182 for 3 degrees of freedom.
    without = np.array([21 / 60, *((21 - i) / 90 for i in range(1, 7))])
    half = 3.182 * math.sqrt(6 / 7 * float(((without - 0.21) ** 2).sum()))
    assert width(tau_interval(long)) == pytest.approx(half + min(half, 0.21), abs=1e-3)


def test_groups_count_and_not_their_prompts() -> None:
    """Ten groups of one prompt, and the same ten with every prompt cut into four: the interval is the same."""
    whole = [counts(f"p{i}", 40, 4 * (i + 1), 2 * i) for i in range(10)]
    parts = [
        counts(f"p{i}.{part}", 10, (i + 1), *([i // 2 + (part < 2 and i % 2)]), group=f"p{i}")
        for i in range(10)
        for part in range(4)
    ]
    assert tau(parts) == pytest.approx(tau(whole))
    assert tau_interval(parts) == pytest.approx(tau_interval(whole))
    # The control: prompts as if they were independent give half the width.
    assert width(tau_interval(alone(parts))) < 0.55 * width(tau_interval(parts))


def test_detectable_gain_by_hand() -> None:
    """t of 5 degrees of freedom: 2.571 at 5 % two-sided, 0.920 at 20 % one-sided."""
    assert Spread(0.1, 5).detectable(0.05) == pytest.approx(0.1 * (2.5706 + 0.9195), abs=1e-4)
    assert t_quantile(5, 0.4) == pytest.approx(0.9195, abs=1e-4)
    assert t_quantile(1, 0.01) == pytest.approx(63.657, abs=1e-2)
