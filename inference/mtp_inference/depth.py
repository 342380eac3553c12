"""Choose the number of drafts per round from measured costs and running acceptance.

A round at depth K commits ``1 + a_1 + a_1 a_2 + ...`` tokens on average, where ``a_k`` is the conditional acceptance of
draft k (``mtp_train.acceptance.counts``). It takes longer the deeper it drafts (Leviathan et al., arXiv:2211.17192,
section 3.5). The best depth may be 0, as drafts only cost time on text that the head cannot predict. The module reads
no clock and draws no random numbers.

While requests wait for a row, the best depth has the most expected tokens per second. After that, the batch ends when
its last text ends: the best depth then has the shortest expected time until the end of all texts. One row without
right drafts sets the number of rounds, and drafts of other rows make each of these rounds slower.

The estimates cost time, besides the rounds that run at a wrong depth:

- Costs: 4 rounds without drafts and 4 rounds at depth 3, for several rows 2 rounds at depth 2, once for all requests of
  a decoder. A batch size larger than all measured ones is measured again; a smaller one is taken to cost as much as the
  nearest measured one. 4 more rounds without drafts follow when all of the last 512 rounds of that size had drafts.
- Acceptance: while nothing is drafted, one draft in 8 to 64 rounds or more, for at most 1 % of the time, and
  0.5 % with several rows.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul

HYSTERESIS = 0.02
"""Smallest relative gain in expected tokens per second for which the depth is changed."""

# Costs: largest and smallest number of rounds behind an estimate; its maximum age; the depth that sets the slope.
_WINDOW_ROUNDS = 16
_MEASURED_ROUNDS = 4
_STALE_ROUNDS = 512
_REFERENCE_DEPTH = 3

# In a batch, a round at depth 3 takes up to 3 times as long as one without drafts, and gains nothing if one row accepts
# nothing. Its costs are therefore measured with fewer and cheaper rounds, and only if the rounds of this batch size,
# with those to come, are enough for the measurement to take at most about 3 % of the time.
_BATCH_MEASURED_ROUNDS = 2
_BATCH_REFERENCE_DEPTH = 2
_BATCH_ROUNDS_WORTH_MEASURING = 96

# Smallest relative gain over plain decoding for which the last rows of a batch draft. The last text to end decides, and
# the estimate of the row that accepts least is the least certain; the costs of two depths are measured at different
# times, and the load of the machine may have changed in between.
_BATCH_MARGIN = 0.1

# Acceptance: prior mean of a decoder's first request, and the lower bound for later requests; weight of the prior in
# rounds; memory in rounds; the chance of a run of rejections below which the estimate is distrusted. The weight limits
# the cost of a wrong prior: at 0.75 the estimate of an unpredictable request after many predictable ones is corrected
# after about five rounds.
_FIRST_GUESS = 0.7
_LEAST_PRIOR = 0.4
_PRIOR_WEIGHT = 0.75
_DECODER_MEMORY_ROUNDS = 200
_REQUEST_MEMORY_ROUNDS = 50
_SURPRISE = 0.001

# Probes: rounds from one to the next, and their share of the time.
_MIN_PROBE_GAP_ROUNDS = 8
_MAX_PROBE_GAP_ROUNDS = 64
_PROBE_SHARE = 0.01
_BATCH_PROBE_SHARE = 0.005


class RoundCosts:
    """Seconds of a round by batch rows and depth, shared by all requests of a decoder.

    The estimate of a depth is the lower median of its last 16 rounds: one slow round, on a busy machine or with a
    compilation or a long prompt, then has little effect. An estimate that was not renewed for 512 rounds of its batch
    size is dropped, as contexts grow and the load of the machine changes.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _SizeCosts] = {}

    def observe(self, num_rows: int, depth: int, seconds: float) -> None:
        """Record the time of one round; 0 seconds, from a coarse clock, are ignored."""
        if seconds > 0.0:
            self._size(num_rows).observe(depth, seconds)

    def seconds(self, num_rows: int, depth: int) -> float | None:
        """Return the seconds of a round: measured, or interpolated between measured depths of that batch size.

        The line goes through the two neighbouring depths; beyond the deepest it goes through the shallowest and the
        deepest.

        Returns:
            Seconds; None if this depth is not measured and fewer than two others are.
        """
        figures = self._size(num_rows).figures
        if depth in figures:
            return figures[depth]
        if len(figures) < 2:
            return None
        known = sorted(figures)
        above = max(bisect(known, depth), 1)
        low, high = (known[above - 1], known[above]) if above < len(known) else (known[0], known[-1])
        # A negative slope is noise: treat depth as free.
        slope = max((figures[high] - figures[low]) / (high - low), 0.0)
        return figures[low] + slope * (depth - low)

    def measured_size(self, num_rows: int) -> int:
        """Return the batch size whose costs to use: this one, or the nearest whose depths can be compared."""
        return _nearest(self._complete_sizes(), num_rows)

    def curves(self, max_rows: int, max_depth: int) -> list[list[float]]:
        """Return the seconds of a round at depths 0 to ``max_depth``, for 1 to ``max_rows`` rows.

        A batch size that is not measured costs as much as the nearest one that is.
        """
        complete = self._complete_sizes()
        if len(complete) == 1:
            return [self.curve(complete[0], max_depth)] * max_rows
        sizes = [_nearest(complete, num_rows) for num_rows in range(1, max_rows + 1)]
        known = {size: self.curve(size, max_depth) for size in set(sizes)}
        return [known[size] for size in sizes]

    def curve(self, num_rows: int, max_depth: int) -> list[float]:
        """Return the seconds of a round at depths 0 to ``max_depth`` at the nearest measured batch size."""
        size = self.measured_size(num_rows)
        figures = [self.seconds(size, depth) for depth in range(max_depth + 1)]
        return [math.inf if figure is None else figure for figure in figures]

    def depth_to_measure(self, num_rows: int, max_depth: int, rounds_left: float = math.inf) -> int | None:
        """Return a depth that must be measured before depths can be compared; None if no more is needed.

        Args:
            num_rows: Number of batch rows.
            max_depth: Largest number of drafts of the window.
            rounds_left: Upper bound of the rounds to come. If they are too few to measure drafts, the depth is 0.
        """
        # Plain rounds are measured at every larger size: they cost no time, and drafts may be dearer there.
        if self.measured_size(num_rows) > num_rows:
            return None
        size = self._size(num_rows)
        if 0 not in size.figures:
            return 0
        # One other depth is enough. While nothing is drafted, probes keep depth 1 measured.
        if len(size.figures) > 1:
            return None
        if num_rows == 1:
            return min(_REFERENCE_DEPTH, max_depth)
        is_worth = size.num_rounds + rounds_left >= _BATCH_ROUNDS_WORTH_MEASURING
        return min(_BATCH_REFERENCE_DEPTH, max_depth) if is_worth else 0

    def _complete_sizes(self) -> list[int]:
        return [size for size, costs in self._sizes.items() if 0 in costs.figures and len(costs.figures) > 1]

    def _size(self, num_rows: int) -> _SizeCosts:
        return self._sizes.setdefault(
            num_rows, _SizeCosts(_MEASURED_ROUNDS if num_rows == 1 else _BATCH_MEASURED_ROUNDS)
        )


def _nearest(sizes: Sequence[int], num_rows: int) -> int:
    """Return the size nearest to a number of rows, the smaller of two; the number itself if there are none."""
    return (
        num_rows if num_rows in sizes else min(sizes, key=lambda size: (abs(size - num_rows), size), default=num_rows)
    )


class _SizeCosts:
    """Costs of rounds of one batch size.

    Args:
        draft_rounds: Smallest number of rounds behind the estimate of a depth above 0.
    """

    def __init__(self, draft_rounds: int) -> None:
        self.draft_rounds = draft_rounds
        self.figures: dict[int, float] = {}
        """Seconds of every depth with enough measured rounds."""
        self.num_rounds = 0
        self._last_round: dict[int, int] = {}
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW_ROUNDS))

    def observe(self, depth: int, seconds: float) -> None:
        self.num_rounds += 1
        self._last_round[depth] = self.num_rounds
        self._recent[depth].append(seconds)
        if len(self._recent[depth]) >= (self.draft_rounds if depth else _MEASURED_ROUNDS):
            self.figures[depth] = _typical(self._recent[depth])
        for stale in [at for at, last in self._last_round.items() if self.num_rounds - last >= _STALE_ROUNDS]:
            del self._last_round[stale], self._recent[stale]
            self.figures.pop(stale, None)


def _typical(seconds: Iterable[float]) -> float:
    return statistics.median_low(seconds)


class Acceptance:
    """Running conditional acceptance by draft position, with exponential forgetting.

    Each position has a mean and its weight in rounds. A mean without observations weighs less than one round (a Beta
    prior). Positions are reached in order, so the observed positions are a prefix; later positions are assumed to equal
    the last observed one.

    One instance, made without arguments, is shared by all requests of a decoder and is the prior of new requests.

    Args:
        means: Prior means of the first positions, at least one.
        memory_rounds: Number of rounds after which a round's weight has fallen to 1/e.
    """

    def __init__(self, means: Sequence[float] = (_FIRST_GUESS,), memory_rounds: int = _DECODER_MEMORY_ROUNDS) -> None:
        self._means = list(means)
        self._weights = [_PRIOR_WEIGHT] * len(self._means)
        self._memory_rounds = memory_rounds

    def for_request(self) -> Acceptance:
        """Return the prior of a new request: these means, with the weight of a prior and a lower bound.

        The bound makes sure that drafts are tried even if all earlier texts were hard to predict.
        """
        return Acceptance([max(mean, _LEAST_PRIOR) for mean in self._means], _REQUEST_MEMORY_ROUNDS)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record one round. Drafts after the first rejected one were not judged and are ignored.

        At positions without an observation the mean stays and its weight falls. At positions beyond the round's drafts
        the mean also moves towards the mean of the position before, so that bad luck cannot exclude a position forever.
        """
        self._weights = [max(weight * (1.0 - 1.0 / self._memory_rounds), _PRIOR_WEIGHT) for weight in self._weights]
        for position in range(min(num_drafted, num_accepted + 1)):
            if position == len(self._means):
                self._means.append(self._means[-1])
                self._weights.append(_PRIOR_WEIGHT)
            self._weights[position] += 1.0
            accepted = float(position < num_accepted)
            self._means[position] += (accepted - self._means[position]) / self._weights[position]
        for position in range(num_drafted, len(self._means) if num_drafted else 0):
            self._means[position] += (self._means[position - 1] - self._means[position]) / self._memory_rounds

    def distrust(self) -> None:
        """Reset the weight of every mean to the prior's."""
        self._weights = [_PRIOR_WEIGHT] * len(self._weights)

    def conditional(self, depth: int) -> list[float]:
        """Return the estimate for each of the first ``depth`` positions."""
        unreached = [self._means[-1]] * (depth - len(self._means))
        return [*self._means, *unreached][:depth]


class DepthController:
    """Estimate the acceptance of one request, and keep its current depth.

    Call :func:`batch_depth` before a round and :meth:`observe` after it.

    Args:
        max_depth: Largest number of drafts per round; 0 never drafts.
        prior: Acceptance of the decoder's earlier requests; None for the default. This request's rounds are added.
    """

    def __init__(self, max_depth: int, prior: Acceptance | None) -> None:
        self.max_depth = max_depth
        self.settled: int | None = None
        """The current depth, probes aside, until another is faster by ``HYSTERESIS``; None before the first choice."""
        self.is_tried = max_depth == 0
        """Whether a round with drafts of this request was observed; True if it must not draft."""
        self._prior = Acceptance() if prior is None else prior
        self._own = self._prior.for_request()
        self._run_chance = 1.0
        self._probe_gap = _MIN_PROBE_GAP_ROUNDS
        self._rounds_unprobed = 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record one round of this request, also a round without drafts."""
        if num_drafted:
            self.is_tried = True
            self._doubt(num_accepted)
            self._prior.observe(num_drafted, num_accepted)
        self._own.observe(num_drafted, num_accepted)
        self._rounds_unprobed += 1
        if self.settled == 0 and num_drafted:
            self._probe_gap = _MIN_PROBE_GAP_ROUNDS if num_accepted else min(2 * self._probe_gap, _MAX_PROBE_GAP_ROUNDS)

    def conditional(self) -> list[float]:
        """Return the running conditional acceptance of this request, ``max_depth`` entries."""
        return self._own.conditional(self.max_depth)

    def expected_tokens(self, depth: int) -> list[float]:
        """Return the expected tokens of rounds with 0 to ``depth`` drafts; drafts beyond ``max_depth`` add nothing."""
        reached = accumulate(self.conditional()[:depth], mul)
        expected = list(accumulate(reached, initial=1.0))
        return expected + expected[-1:] * (depth + 1 - len(expected))

    def settle(self, depth: int) -> None:
        """Set the current depth."""
        if depth != self.settled:
            self.settled = depth
            self._probe_gap = _MIN_PROBE_GAP_ROUNDS
            self.begin_probe()

    def is_probe_due(self, min_gap_rounds: float) -> bool:
        """Return whether a probe (one draft) is due; ``min_gap_rounds`` is the smallest gap that the costs allow."""
        return self._rounds_unprobed >= max(self._probe_gap, min_gap_rounds)

    def begin_probe(self) -> None:
        """Restart the count of rounds to the next probe: its outcome may be read only after further rounds began."""
        self._rounds_unprobed = 0

    def _doubt(self, num_accepted: int) -> None:
        """Distrust the estimate after a run of rejected first drafts that is very unlikely under it.

        The text has then changed, and a memory long enough to tell neighbouring depths apart adapts too slowly.
        """
        self._run_chance = 1.0 if num_accepted else self._run_chance * (1.0 - self._own.conditional(1)[0])
        if self._run_chance < _SURPRISE:
            self._own.distrust()
            self._run_chance = 1.0


def batch_depth(
    controllers: Sequence[DepthController],
    costs: RoundCosts,
    num_rows: int,
    max_depth: int,
    tokens_left: Sequence[int] | None = None,
    drops_rows: bool = True,
) -> int:
    """Return the depth of the next round for rows that share one window.

    A row with a smaller ``max_depth`` counts with its own expected tokens; a row that must not draft has a controller
    with ``max_depth`` 0.

    Args:
        controllers: One for each row, at least one.
        costs: The decoder's costs; the caller adds the time of each round.
        num_rows: Number of batch rows that the costs are looked up by.
        max_depth: Largest number of drafts of the window.
        tokens_left: Tokens until the limit of each row, at least 1, to end all texts as early as possible; None for
            the most tokens per second, while further requests wait for a row.
        drops_rows: Whether rounds have fewer rows once texts have ended.
    """
    max_depth = min(max_depth, max(controller.max_depth for controller in controllers))
    if max_depth <= 0:
        return 0
    rounds_left = math.inf if tokens_left is None else max(tokens_left)
    if (unmeasured := costs.depth_to_measure(num_rows, max_depth, rounds_left)) is not None:
        return unmeasured
    seconds = costs.curve(num_rows, max_depth)
    expected = [each.expected_tokens(max_depth) for each in controllers]
    if tokens_left is None:
        speeds = [sum(rows) / taken for rows, taken in zip(zip(*expected, strict=True), seconds, strict=True)]
    else:
        # Without dropped rows every round costs the same.
        by_live = costs.curves(len(expected), max_depth) if drops_rows else [seconds] * len(expected)
        ends = map(_seconds_to_end, zip(*expected, strict=True), repeat(tokens_left), zip(*by_live, strict=True))
        speeds = [1.0 / end for end in ends]
    chosen = _choose(speeds, [each.settled for each in controllers if each.settled is not None])
    if tokens_left is not None and num_rows > 1 and speeds[chosen] < (1.0 + _BATCH_MARGIN) * speeds[0]:
        chosen = 0
    for each in controllers:
        each.settle(chosen)
    if chosen == 0:
        share = _PROBE_SHARE if num_rows == 1 else _BATCH_PROBE_SHARE
        return _probe_depth(controllers, (seconds[1] / seconds[0] - 1.0) / share)
    # One row without right drafts can turn the gain of a batch into a loss: try each row once before drafting deeply.
    is_tried = tokens_left is None or num_rows == 1 or all(each.is_tried for each in controllers)
    return chosen if is_tried else 1


def _seconds_to_end(expected: Sequence[float], tokens_left: Sequence[int], seconds_by_live: Sequence[float]) -> float:
    """Return the expected seconds until all rows have ended, if the depth stays as it is.

    Args:
        expected: Expected tokens of each row per round.
        tokens_left: Tokens until the limit of each row.
        seconds_by_live: Seconds of a round with 1, 2, ... unfinished rows.
    """
    rounds = sorted((left / tokens for left, tokens in zip(tokens_left, expected, strict=True)), reverse=True)
    further = [more - fewer for more, fewer in zip(rounds, [*rounds[1:], 0.0], strict=True)]
    return sum(map(mul, further, seconds_by_live))


def _probe_depth(controllers: Sequence[DepthController], min_gap_rounds: float) -> int:
    """Return 1 if a probe is due while nothing is drafted, else 0."""
    drafting = [each for each in controllers if each.max_depth]
    # A majority decides: a probe drafts in all rows, and a new row alone must not force it on the others.
    if 2 * sum(each.is_probe_due(min_gap_rounds) for each in drafting) < len(drafting):
        return 0
    for each in drafting:
        each.begin_probe()
    return 1


def _choose(speeds: Sequence[float], settled: Sequence[int]) -> int:
    """Return the fastest depth; the current depth if it is hardly slower; 0 if drafts gain nothing."""
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    stay = min(max(settled, default=fastest), len(speeds) - 1)
    chosen = fastest if speeds[fastest] > (1.0 + HYSTERESIS) * speeds[stay] else stay
    # While rounds draft, the cost of plain decoding is renewed least often: a tie with it is more likely a loss.
    return chosen if speeds[chosen] > (1.0 + HYSTERESIS / 2.0) * speeds[0] else 0
