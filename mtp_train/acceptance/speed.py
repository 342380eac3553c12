"""The speed of decoding with drafts over that without, and whether drafts pay.

A round with drafts takes longer than a plain step, so tau alone does not decide. The *break-even tau* is the ratio of
the two times: drafts pay where tau exceeds it, which is where the speedup exceeds 1, prefill aside.

Texts and times are measured apart. How many rounds a text takes is counted on all prompts, in batches. How long a round
takes varies little between prompts, but with the other work of the machine: a few prompts are timed several times, one
at a time, and each prompt's best time counts. The time of a text is its prefill and its rounds at these times. The
interval is of the logarithm of the ratio, and contains both errors: of rounds over the groups of all prompts, of times
over the groups of the timed ones.

Shapes: P prompts, G groups, X sums over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mtp_train.acceptance.counts import FloatArray, Interval, PromptCounts, num_groups
from mtp_train.acceptance.intervals import Difference, Spread, jackknife, mean_shares, sum_by_group

Verdict = Literal["above", "below", "neither"]
"""Where an interval lies: ``above`` or ``below`` the value that decides, or on both sides of it."""
CLOCK_SHARE = 0.5
"""Times are precise enough where their error is below this share of that of the rounds: it then adds 12 %."""


class Pair(NamedTuple):
    """Counts of a head and of its baseline, on the same prompts in the same order."""

    head: Sequence[PromptCounts]
    baseline: Sequence[PromptCounts]
    timed_head: Sequence[PromptCounts] = ()
    """Counts of the timed prompts, with their best times."""
    timed_baseline: Sequence[PromptCounts] = ()


def side(interval: Interval | None, value: float | None) -> Verdict:
    """Return where an interval lies: above or below a value, or neither."""
    if interval is None or value is None:
        return "neither"
    return "above" if interval[0] > value else "below" if interval[1] < value else "neither"


def break_even_tau(drafted: Sequence[PromptCounts], plain: Sequence[PromptCounts]) -> float | None:
    """Return the time of a round with drafts over the time of a plain one, on the same prompts.

    None where a time was not measured or nothing was decoded.
    """
    with_drafts = round_seconds(drafted)
    without = round_seconds(plain)
    return with_drafts / without if with_drafts is not None and without else None


def round_seconds(counts: Sequence[PromptCounts]) -> float | None:
    """Return the mean time of a round, prefill excluded; None where it was not measured or nothing was decoded."""
    clock = _clock(counts)
    if clock is None:
        return None
    _, rounds, _, seconds = clock.sum(axis=0).tolist()
    return seconds / rounds if rounds else None


def tokens_per_second(decoded: Sequence[PromptCounts], timed: Sequence[PromptCounts]) -> float | None:
    """Return the new tokens of decoded prompts over the time of their prefill and rounds; None without times."""
    texts = _texts(decoded).sum(axis=0)
    clock = _clock(timed)
    found = math.nan if clock is None else 1.0 / float(_seconds_per_token(texts, clock.sum(axis=0)))
    return found if math.isfinite(found) else None


class Speedup(NamedTuple):
    """The speed with drafts over the speed without, prefill included.

    Attributes:
        log: Its logarithm, with the whole spread.
        of_texts: The part of the spread that more prompts narrow.
        of_clock: The part of the spread that more passes narrow.
    """

    log: Difference
    of_texts: Spread | None
    of_clock: Spread | None

    @property
    def value(self) -> float:
        return math.exp(self.log.value)

    def interval(self, level: float) -> Interval | None:
        """Return the interval at a two-sided level; None for a single group."""
        bounds = self.log.interval(level)
        return None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1]))

    @property
    def needs_passes(self) -> bool:
        """Whether further passes may decide: the 95 % interval holds 1, and the times have a share in its width."""
        if self.of_texts is None or self.of_clock is None or side(self.interval(0.05), 1.0) != "neither":
            return False
        return self.of_clock.error > CLOCK_SHARE * self.of_texts.error


def measured_speedup(pair: Pair) -> Speedup | None:
    """Return the speedup of a head over plain decoding of the same prompts; None without measured times."""
    clock = _clock(pair.timed_head)
    plain_clock = _clock(pair.timed_baseline)
    if clock is None or plain_clock is None:
        return None
    texts_G = sum_by_group(np.hstack([_texts(pair.head), _texts(pair.baseline)]), [one.group for one in pair.head])
    clock_G = sum_by_group(np.hstack([clock, plain_clock]), [one.group for one in pair.timed_head])
    texts = texts_G.sum(axis=0)
    clock = clock_G.sum(axis=0)
    value = float(_log_ratio(texts, clock))
    if not math.isfinite(value):
        return None
    of_texts = jackknife(value, _log_ratio(texts - texts_G, clock), mean_shares(texts_G[:, 1::3]))
    of_clock = jackknife(value, _log_ratio(texts, clock - clock_G), mean_shares(clock_G[:, 1::4]))
    spread = None if of_texts is None or of_clock is None else of_texts.plus(of_clock)
    return Speedup(Difference(value, spread, num_groups(pair.head)), of_texts, of_clock)


def _texts(counts: Sequence[PromptCounts]) -> FloatArray:
    """Return prompts, rounds and tokens of each prompt, (P, 3)."""
    return np.array([(1, one.rounds, one.new_tokens) for one in counts], dtype=np.float64).reshape(-1, 3)


def _clock(counts: Sequence[PromptCounts]) -> FloatArray | None:
    """Return prompts, rounds, seconds of prefill and of rounds of each prompt, (P, 4); None where not measured.

    Where prefill was not measured apart, it counts as rounds.
    """
    rows = [
        (1, one.rounds, one.seconds_prefill or 0.0, one.seconds_decode)
        for one in counts
        if one.seconds_decode is not None
    ]
    return np.array(rows, dtype=np.float64) if rows and len(rows) == len(counts) else None


def _seconds_per_token(texts_X3: FloatArray, clock_X4: FloatArray) -> FloatArray:
    # A group that holds all rounds leaves 0 / 0 behind. Its NaN means "no spread" to `jackknife`.
    with np.errstate(divide="ignore", invalid="ignore"):
        prompts_X, rounds_X, tokens_X = np.moveaxis(texts_X3, -1, 0)
        timed_X, timed_rounds_X, prefill_X, decode_X = np.moveaxis(clock_X4, -1, 0)
        seconds_X = prompts_X * prefill_X / timed_X + rounds_X * decode_X / timed_rounds_X
        return seconds_X / tokens_X


def _log_ratio(texts_X6: FloatArray, clock_X8: FloatArray) -> FloatArray:
    drafted_X = _seconds_per_token(texts_X6[..., :3], clock_X8[..., :4])
    plain_X = _seconds_per_token(texts_X6[..., 3:], clock_X8[..., 4:])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(plain_X / drafted_X)
