"""How many tokens to draft in the next round: measured costs, running acceptance, and the depth that pays best.

A round at depth K commits ``1 + a_1 + a_1 a_2 + ...`` tokens on average, where ``a_k`` is the conditional acceptance of
draft k (``mtp_train.acceptance``), and takes the longer the deeper it drafts (Leviathan et al., arXiv:2211.17192,
section 3.5). The best depth has the most expected tokens per second. It may be 0: on text that the head cannot predict
every draft is a loss. Nothing here reads a clock or draws a random number.

What finding out costs, besides rounds lost to an estimate that is still wrong:

- Costs: 4 rounds without drafts and 4 at depth 3 for each batch size, once for all requests of a decoder; and 4 rounds
  without drafts again where every round of that size has drafted for 512 rounds.
- Acceptance: where nothing is drafted, one draft in 8 to 64 rounds or more, for at most 1 % of the time.
"""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

HYSTERESIS = 0.02
"""Gain in expected tokens per second that a change of depth must promise."""

# Costs: rounds a figure rests on, at most and at least; when it is too old; the depth that gives the line its slope.
_WINDOW_ROUNDS = 16
_MEASURED_ROUNDS = 4
_STALE_ROUNDS = 512
_REFERENCE_DEPTH = 3

# Acceptance: what a decoder assumes of its first request, and at least of every other; what that weighs against one
# round; when rounds are forgotten. The weight decides what a wrong prior costs: at 0.75 an unpredictable request after
# many predictable ones is known as such after some five rounds.
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


class RoundCosts:
    """Seconds of a round by batch rows and depth, shared by all requests of a decoder.

    The figure of a depth is the median of its last 16 rounds, the lower one of two: a round that met a busy machine, a
    compilation or a long prompt counts as one round, however long it took. What was not renewed for 512 rounds of its
    batch size is dropped, as contexts grow and machines change.
    """

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _SizeCosts] = defaultdict(_SizeCosts)

    def observe(self, num_rows: int, depth: int, seconds: float) -> None:
        """Take in the wall time of one round; a clock too coarse to see the round tells nothing."""
        if seconds > 0.0:
            self._sizes[num_rows].observe(depth, seconds)

    def seconds(self, num_rows: int, depth: int) -> float | None:
        """Return what a round takes: as measured, else from a line through measured depths of that batch size.

        The line goes through the neighbours; beyond the deepest it goes through the shallowest and the deepest.

        Returns:
            Seconds; None where this depth is not measured and fewer than two others are.
        """
        figures = self._sizes[num_rows].figures
        if depth in figures:
            return figures[depth]
        if len(figures) < 2:
            return None
        known = sorted(figures)
        above = max(bisect(known, depth), 1)
        low, high = (known[above - 1], known[above]) if above < len(known) else (known[0], known[-1])
        # Where noise says that a deeper round takes less time, depth makes no difference.
        slope = max((figures[high] - figures[low]) / (high - low), 0.0)
        return figures[low] + slope * (depth - low)

    def depth_to_measure(self, num_rows: int, max_depth: int) -> int | None:
        """Return a depth that must run before depths can be compared; None where enough is known."""
        figures = self._sizes[num_rows].figures
        if 0 not in figures:
            return 0
        # Any other depth will do, once there is one: where nothing is drafted, probes keep depth 1 measured.
        return min(_REFERENCE_DEPTH, max_depth) if len(figures) == 1 else None


class _SizeCosts:
    """Costs of one batch size."""

    def __init__(self) -> None:
        self.figures: dict[int, float] = {}
        """Seconds of every depth measured often enough."""
        self._num_rounds = 0
        self._last_round: dict[int, int] = {}
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW_ROUNDS))

    def observe(self, depth: int, seconds: float) -> None:
        self._num_rounds += 1
        self._last_round[depth] = self._num_rounds
        self._recent[depth].append(seconds)
        if len(self._recent[depth]) >= _MEASURED_ROUNDS:
            self.figures[depth] = _typical(self._recent[depth])
        for stale in [at for at, last in self._last_round.items() if self._num_rounds - last >= _STALE_ROUNDS]:
            del self._last_round[stale], self._recent[stale]
            self.figures.pop(stale, None)


def _typical(seconds: Iterable[float]) -> float:
    return statistics.median_low(seconds)


class Acceptance:
    """Running conditional acceptance by position, which forgets exponentially.

    Each position has a mean and the weight, in rounds, that stands behind it; a mean that nothing stands behind yet
    weighs less than one round (a Beta prior). Positions are reached in order, so that those ever reached are a prefix;
    the ones beyond are taken to be as good as the last of them.

    One instance, made without arguments, is shared by all requests of a decoder: it tells a new request what to expect.

    Args:
        means: What to assume at the first positions, at least at one.
        memory_rounds: Rounds after which a round counts 1/e.
    """

    def __init__(self, means: Sequence[float] = (_FIRST_GUESS,), memory_rounds: int = _DECODER_MEMORY_ROUNDS) -> None:
        self._means = list(means)
        self._weights = [_PRIOR_WEIGHT] * len(self._means)
        self._memory_rounds = memory_rounds

    def for_request(self) -> Acceptance:
        """Return what a new request starts from: these means, held loosely and none of them hopeless.

        A decoder that met hard texts only must still give the next one a chance.
        """
        return Acceptance([max(mean, _LEAST_PRIOR) for mean in self._means], _REQUEST_MEMORY_ROUNDS)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one round. Drafts behind the first rejected one were never judged and tell nothing.

        Where a round tells nothing, the mean stays and gives way to later rounds more easily; behind the drafts of a
        round it fades into that of the position before, so that bad luck does not keep a position untried for good.
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
        """Keep the means as a first guess only."""
        self._weights = [_PRIOR_WEIGHT] * len(self._weights)

    def conditional(self, depth: int) -> list[float]:
        """Return the estimate for each of the first ``depth`` positions."""
        unreached = [self._means[-1]] * (depth - len(self._means))
        return [*self._means, *unreached][:depth]


class DepthController:
    """Choose the depth of each round of one request.

    Call :meth:`next_depth` before a round and :meth:`observe` after it, and give the round's time to ``costs``.

    Args:
        costs: The decoder's costs.
        max_depth: Most drafts a round may have; 0 never drafts.
        prior: What the decoder's requests accepted so far, None where nothing is known. It learns from this one, too.
    """

    def __init__(self, costs: RoundCosts, max_depth: int, prior: Acceptance | None) -> None:
        self.max_depth = max_depth
        self.settled: int | None = None
        """The depth to stay at until another promises more, probes apart; None before the first choice."""
        self._costs = costs
        self._prior = Acceptance() if prior is None else prior
        self._own = self._prior.for_request()
        self._run_chance = 1.0
        self._probe_gap = _MIN_PROBE_GAP_ROUNDS
        self._rounds_unprobed = 0

    def next_depth(self, num_rows: int) -> int:
        """Return how many tokens to draft in the next round, 0 to ``max_depth``.

        Args:
            num_rows: Rows of the batch under which its rounds are timed.
        """
        return batch_depth([self], self._costs, num_rows, self.max_depth)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one round of this request; a round without drafts is one, too."""
        if num_drafted:
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
        """Return what rounds of 0 to ``depth`` drafts should commit; drafts beyond ``max_depth`` add nothing."""
        reached = accumulate(self.conditional()[:depth], mul)
        expected = list(accumulate(reached, initial=1.0))
        return expected + expected[-1:] * (depth + 1 - len(expected))

    def settle(self, depth: int) -> None:
        """Take a depth as the one to stay at."""
        if depth != self.settled:
            self.settled = depth
            self._probe_gap = _MIN_PROBE_GAP_ROUNDS
            self.begin_probe()

    def is_probe_due(self, min_gap_rounds: float) -> bool:
        """Say whether to draft once where nothing else is drafted; ``min_gap_rounds`` is what the costs ask for."""
        return self._rounds_unprobed >= max(self._probe_gap, min_gap_rounds)

    def begin_probe(self) -> None:
        """Count the rounds to the next probe from here, as its outcome may be seen only after further rounds began."""
        self._rounds_unprobed = 0

    def _doubt(self, num_accepted: int) -> None:
        """Notice that the text has changed: a run of rejected first drafts that the estimate makes all but impossible.

        A memory long enough to tell neighbouring depths apart is too long to let go of a text that has ended.
        """
        self._run_chance = 1.0 if num_accepted else self._run_chance * (1.0 - self._own.conditional(1)[0])
        if self._run_chance < _SURPRISE:
            self._own.distrust()
            self._run_chance = 1.0


def batch_depth(controllers: Sequence[DepthController], costs: RoundCosts, num_rows: int, max_depth: int) -> int:
    """Return the depth of the next round of rows that share one window.

    It has the most expected tokens per second over all rows. A row that may not draft as deep counts with what it may;
    one that must not draft takes part with a controller of ``max_depth`` 0.

    Args:
        controllers: One for each row, at least one.
        costs: The decoder's costs.
        num_rows: Rows of the batch under which its rounds are timed.
        max_depth: Most drafts the window may have.
    """
    max_depth = min(max_depth, max(controller.max_depth for controller in controllers))
    if max_depth <= 0:
        return 0
    if (unmeasured := costs.depth_to_measure(num_rows, max_depth)) is not None:
        return unmeasured
    figures = [costs.seconds(num_rows, depth) for depth in range(max_depth + 1)]
    seconds = [figure for figure in figures if figure is not None]
    tokens = [sum(rows) for rows in zip(*(each.expected_tokens(max_depth) for each in controllers), strict=True)]
    speeds = [expected / taken for expected, taken in zip(tokens, seconds, strict=True)]
    chosen = _choose(speeds, [each.settled for each in controllers if each.settled is not None])
    for each in controllers:
        each.settle(chosen)
    if chosen == 0:
        drafting = [each for each in controllers if each.max_depth]
        min_gap_rounds = (seconds[1] / seconds[0] - 1.0) / _PROBE_SHARE
        # A majority decides: a probe serves all rows, and one that has just come must not force it on the rest.
        if 2 * sum(each.is_probe_due(min_gap_rounds) for each in drafting) >= len(drafting):
            for each in drafting:
                each.begin_probe()
            return 1
    return chosen


def _choose(speeds: Sequence[float], settled: Sequence[int]) -> int:
    """Return the fastest depth, or the one settled on where that promises hardly less; 0 where drafts gain nothing."""
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    stay = min(max(settled, default=fastest), len(speeds) - 1)
    chosen = fastest if speeds[fastest] > (1.0 + HYSTERESIS) * speeds[stay] else stay
    # Plain decoding is the figure least often renewed while drafts go on: a tie with it is more likely a loss.
    return chosen if speeds[chosen] > (1.0 + HYSTERESIS / 2.0) * speeds[0] else 0
