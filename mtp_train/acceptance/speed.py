"""Whether drafts pay: the one decision behind the gate against plain decoding, headlines and serving advice.

A round with drafts takes longer than a plain step, so tau alone does not decide. The *break-even tau* is the ratio of
the two times: drafts pay where tau exceeds it, which is where the speedup exceeds 1, prefill aside.

Shapes: P prompts, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mtp_train.acceptance.counts import FloatArray, Interval, PromptCounts
from mtp_train.acceptance.intervals import Difference, judge_difference, sum_by_group, two_sided_p

Verdict = Literal["above", "below", "neither"]
"""Where an interval lies: ``above`` or ``below`` the value that decides, or on both sides of it."""


def pays(
    speedup: float | None,
    speedup_interval: Interval | None,
    tau_interval: Interval | None,
    break_even_tau: float | None,
) -> Verdict:
    """Decide whether drafts are shown to pay. A mean above 1 alone shows nothing.

    The interval of the measured speedup decides where it is known: it contains the spread of texts and of times, and
    prefill. Without it, the interval of tau decides by its side of the break-even tau, unless the measured speedup
    contradicts it: a head that is slower over whole replies does not pay, whatever its rounds cost.

    Args:
        speedup: Tokens per second over those of plain decoding; None where only the costs of rounds are known.
        speedup_interval: Interval of the speedup; None where it is unknown.
        tau_interval: Interval of tau; None for a single group of prompts.
        break_even_tau: Tau at which a round with drafts takes as long as plain decoding of the same tokens.
    """
    if speedup_interval is not None:
        return side(speedup_interval, 1.0)
    by_tau = side(tau_interval, break_even_tau)
    if speedup is not None and by_tau != side((speedup, speedup), 1.0):
        return "neither"
    return by_tau


def side(interval: Interval | None, value: float | None) -> Verdict:
    """Return where an interval lies: above or below a value, or neither."""
    if interval is None or value is None:
        return "neither"
    return "above" if interval[0] > value else "below" if interval[1] < value else "neither"


def break_even_tau(drafted: Sequence[PromptCounts], plain: Sequence[PromptCounts]) -> float | None:
    """Return the time of a round with drafts over the time of a plain one, on the same prompts.

    None where a time was not measured or nothing was decoded.
    """
    with_drafts, without = round_seconds(drafted), round_seconds(plain)
    return with_drafts / without if with_drafts is not None and without else None


def round_seconds(counts: Sequence[PromptCounts]) -> float | None:
    """Return the mean time of a round, prefill excluded; None where it was not measured or nothing was decoded."""
    rounds, seconds = sum(one.rounds for one in counts), [one.seconds_decode for one in counts]
    known = [one for one in seconds if one is not None]
    return sum(known) / rounds if rounds and len(known) == len(seconds) else None


def speed_difference(drafted: Sequence[PromptCounts], plain: Sequence[PromptCounts]) -> Difference | None:
    """Return ``speedup - 1`` on the same prompts in the same order, prefill included; None without measured times."""
    rows = [
        (a.new_tokens, a.seconds, b.new_tokens, b.seconds)
        for a, b in zip(drafted, plain, strict=True)
        if a.seconds is not None and b.seconds is not None
    ]
    totals_P4 = np.array(rows, dtype=np.float64).reshape(-1, 4)
    total_4 = totals_P4.sum(axis=0)
    if len(rows) != len(drafted) or not (total_4 > 0).all():
        return None
    totals_G4 = sum_by_group(totals_P4, [one.group for one in drafted])
    weight_G = (totals_G4[:, 1::2] / total_4[1::2]).mean(axis=1)
    return judge_difference(float(_gain(total_4)), _gain(total_4 - totals_G4), weight_G)


def _gain(totals_X4: FloatArray) -> FloatArray:
    # A group that holds all tokens leaves 0 / 0 behind. Its NaN means "no spread" to `judge_difference`.
    with np.errstate(divide="ignore", invalid="ignore"):
        rates_X2 = totals_X4[..., ::2] / totals_X4[..., 1::2]
        gain_X: FloatArray = rates_X2[..., 0] / rates_X2[..., 1] - 1.0
    return gain_X


@dataclass(frozen=True)
class SpeedTest:
    """The test of a head against plain decoding at one setting.

    Attributes:
        tau_gain: ``tau - 1`` with its spread.
        gain: ``speedup - 1``; None where times were not measured.
        break_even_tau: Measured, or of the target engine.
        on_target: True where ``break_even_tau`` is of the target engine. Then it decides alone: the speed measured here
            is that of another engine.
    """

    tau_gain: Difference
    gain: Difference | None
    break_even_tau: float | None
    on_target: bool

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of drafts that neither pay nor cost; None where nothing was measured to decide by."""
        if not self.on_target:
            return None if self.gain is None else self.gain.p_value
        spread = self.tau_gain.spread
        if spread is None or self.break_even_tau is None:
            return None
        margin = 1.0 + self.tau_gain.value - self.break_even_tau
        # Without any spread, the margin alone decides.
        return two_sided_p(margin / spread.error, spread.freedom) if spread.error else float(margin == 0.0)

    def verdict(self, level: float) -> Verdict:
        """Return what intervals at this two-sided level show (:func:`pays`)."""
        if self.on_target:
            return pays(None, None, self.tau_interval(level), self.break_even_tau)
        return pays(None, self.speedup_interval(level), None, None)

    def tau_interval(self, level: float) -> Interval | None:
        """Return the interval of tau; None for a single group."""
        return _above_one(self.tau_gain, level)

    def speedup_interval(self, level: float) -> Interval | None:
        """Return the interval of the speedup; None for a single group or without measured times."""
        return None if self.gain is None else _above_one(self.gain, level)


def _above_one(gain: Difference, level: float) -> Interval | None:
    if gain.spread is None:
        return None
    low, high = gain.spread.interval(1.0 + gain.value, level)
    return low, high
