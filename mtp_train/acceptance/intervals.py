"""Intervals and tests over groups of prompts: the one statistic of run reports, studies and the gate.

Rounds of one prompt are correlated, and so are prompts of one group (a module, a conversation, a file). The jackknife
therefore leaves out one whole group at a time (Efron and Stein, "The jackknife estimate of variance", Annals of
Statistics 9, 1981), and intervals are Student's t. For two arms the same group is left out of both, so that difficulty
that they share cancels. The degrees of freedom are the effective number of groups (Kish's ``(sum w)^2 / sum w^2``,
rounded down) minus 1, because pooled figures weigh long texts more.

``tests/unit/test_acceptance_gate.py`` counts how often a gate passes two equal heads: by this statistic no more often
than it states, by the same over prompts far more often.

Shapes: P prompts, G groups, X figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mtp_train.acceptance.counts import FloatArray, Interval, PromptCounts, accepted_by_position

POWER = 0.8
"""Probability of detecting a gain of size :attr:`Spread.detectable`."""
NO_SPREAD = 1e-9
"""Standard errors below this share of the value are rounding errors."""


class Spread(NamedTuple):
    """The sampling spread of a figure over groups."""

    error: float
    """Standard error."""
    freedom: int
    """Degrees of freedom of the standard error."""

    def interval(self, value: float, level: float) -> Interval:
        """Return the two-sided interval around a value; without an effect it excludes 0 with probability ``level``."""
        half = t_quantile(self.freedom, level) * self.error
        return value - half, value + half

    def plus(self, other: Spread) -> Spread:
        """Return the spread of a sum of two independent figures (degrees of freedom: Welch and Satterthwaite)."""
        error = math.hypot(self.error, other.error)
        if not error:
            return self
        parts = sum((one.error / error) ** 4 / one.freedom for one in (self, other))
        return Spread(error, max(1, math.floor(1.0 / parts + 1e-6)))

    def detectable(self, level: float) -> float:
        """Return the smallest true difference whose interval excludes 0 with probability :data:`POWER`."""
        return (t_quantile(self.freedom, level) + t_quantile(self.freedom, 2 * (1 - POWER))) * self.error


class Difference(NamedTuple):
    """The difference of two arms, first minus second."""

    value: float
    spread: Spread | None
    """None for a single group, which has no spread."""
    groups: int
    """Number of groups that the spread is computed over."""

    def interval(self, level: float) -> Interval | None:
        """Return the interval at a two-sided level; None without a spread."""
        return None if self.spread is None else self.spread.interval(self.value, level)

    @property
    def ci95(self) -> Interval | None:
        return self.interval(0.05)

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of no difference. Below 0.05 exactly if :attr:`ci95` excludes 0, unless all groups are
        equal."""
        if self.spread is None:
            return None
        if self.spread.error > NO_SPREAD * abs(self.value):
            return two_sided_p(self.value / self.spread.error, self.spread.freedom)
        # Without any spread t is undefined. If the arms differ, every group favours the same arm, which happens by
        # chance with this probability.
        return 1.0 if self.value == 0 else 2.0 ** (1 - self.groups)


def sum_by_group(values_PX: FloatArray, groups: Sequence[str]) -> FloatArray:
    """Return the sums over each group's prompts, groups in order of first appearance; later axes are kept."""
    place = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    sums_GX = np.zeros((len(place), *values_PX.shape[1:]))
    np.add.at(sums_GX, [place[group] for group in groups], values_PX)
    return sums_GX


def mean_shares(counts_GX: FloatArray) -> FloatArray:
    """Return each group's mean share of the counts, its weight in a figure of them."""
    return (counts_GX / np.maximum(counts_GX.sum(axis=0), 1.0)).mean(axis=1)


def judge_difference(value: float, without_G: FloatArray, counts_G2: FloatArray) -> Difference:
    """Return a difference with its spread over groups.

    Args:
        without_G: The difference over all groups but one, for each group.
        counts_G2: Rounds or positions of each group, in both arms.
    """
    weight_G = mean_shares(counts_G2)
    return Difference(value, jackknife(value, without_G, weight_G), int((weight_G > 0).sum()))


def tau_difference(first: Sequence[PromptCounts], second: Sequence[PromptCounts]) -> Difference:
    """Return ``tau(first) - tau(second)`` on the same prompts in the same order, each tau pooled over prompts."""
    totals_P4 = np.array(
        [
            (a.num_accepted_tokens, a.rounds, b.num_accepted_tokens, b.rounds)
            for a, b in zip(first, second, strict=True)
        ],
        dtype=np.float64,
    )
    totals_G4 = sum_by_group(totals_P4, [one.group for one in first])
    total_4 = totals_G4.sum(axis=0)
    return judge_difference(float(_difference(total_4)), _difference(total_4 - totals_G4), totals_G4[:, 1::2])


def _difference(totals_X4: FloatArray) -> FloatArray:
    # An arm without rounds has no accepted drafts: 0 / 1.
    accepted_X: FloatArray = totals_X4[..., ::2] / np.maximum(totals_X4[..., 1::2], 1.0)
    return accepted_X[..., 0] - accepted_X[..., 1]


def _interval_per_round(totals_P: FloatArray, counts: Sequence[PromptCounts], high: float) -> Interval | None:
    """Return the 95 % interval of the pooled mean of a round, cut at 0 and at its upper bound.

    Args:
        totals_P: Sum over the rounds of each prompt; terms are 0 or more.
        high: Upper bound of the mean.

    Returns:
        The interval; None if fewer than two groups have a round, as these have no spread.
    """
    groups = [one.group for one in counts]
    totals_G = sum_by_group(totals_P, groups)
    rounds_G = sum_by_group(accepted_by_position(counts)[1], groups)
    if not rounds_G.any():
        return None
    value = float(totals_G.sum() / rounds_G.sum())
    # The clamp avoids a division by 0 if only one group counts; `jackknife` then returns None.
    without_G = (totals_G.sum() - totals_G) / np.maximum(rounds_G.sum() - rounds_G, 1e-9)
    spread = jackknife(value, without_G, rounds_G)
    if spread is None:
        return None
    below, above = spread.interval(value, 0.05)
    return max(0.0, below), min(high, above)


def tau_interval(counts: Sequence[PromptCounts]) -> Interval | None:
    """Return the 95 % interval of tau over groups; None without rounds, and for a single group."""
    accepted_PK, _ = accepted_by_position(counts)
    interval = _interval_per_round(accepted_PK.sum(axis=1), counts, accepted_PK.shape[1])
    return None if interval is None else (1.0 + interval[0], 1.0 + interval[1])


def marginal_intervals(counts: Sequence[PromptCounts]) -> list[Interval | None]:
    """Return the 95 % interval over groups of each entry of ``acceptance.marginal``."""
    return [_interval_per_round(accepted_P, counts, 1.0) for accepted_P in accepted_by_position(counts)[0].T]


def jackknife(value: float, without_G: FloatArray, weight_G: FloatArray) -> Spread | None:
    """Return the spread of a value over groups, given the value without each group; None for fewer than two groups."""
    without_G = without_G[weight_G > 0]
    weight_G = weight_G[weight_G > 0]
    num_groups = len(without_G)
    if num_groups < 2 or not np.isfinite(without_G).all():
        return None
    error = math.sqrt((num_groups - 1) / num_groups * float(((without_G - value) ** 2).sum()))
    in_effect = float(weight_G.sum() ** 2 / (weight_G**2).sum())
    # 1e-6: for equal weights the effective number is the number of groups, up to rounding errors.
    return Spread(error, max(1, math.floor(in_effect + 1e-6) - 1))


def two_sided_p(t: float, freedom: int) -> float:
    """Return the probability that Student's t is at least that far from 0 (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2 == 1
    total = 0.0
    term = cosine if odd else 1.0
    for k in range(3 if odd else 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    within = math.sin(angle) * total
    return max(0.0, 1.0 - (2.0 / math.pi * (angle + within) if odd else within))


@lru_cache(maxsize=4096)
def t_quantile(freedom: int, level: float = 0.05) -> float:
    """Return the t whose :func:`two_sided_p` is ``level``, found by bisection."""
    low = 0.0
    high = 1.0
    while two_sided_p(high, freedom) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > level else (low, middle)
    return high


def holm_levels(p_values: Sequence[float | None], level: float) -> list[float]:
    """Return the level at which Holm's procedure tests each hypothesis, ``level`` over all of them together.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979: it
    holds whatever the dependence between the tests. A missing p-value is no test; its level is 0.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    levels = [0.0] * len(p_values)
    current = last = 0.0
    for place, (p, index) in enumerate(order):
        # The level stops rising after the first hypothesis that is not rejected: none of the later ones is.
        if last <= current:
            current = level / (len(order) - place)
        levels[index], last = current, p
    return levels


def holm(p_values: Sequence[float | None], level: float) -> list[bool]:
    """Return which hypotheses are rejected, at ``level`` over all of them together (:func:`holm_levels`)."""
    return [p is not None and p <= own for p, own in zip(p_values, holm_levels(p_values, level), strict=True)]
