"""Choose the number of drafts per round from measured costs and running acceptance.

A round at depth K commits ``1 + a_1 + a_1 a_2 + ...`` tokens on average, where ``a_k`` is the conditional acceptance of
draft k, and takes longer the deeper it drafts (Leviathan et al., arXiv:2211.17192, section 3.5). While requests wait
for a row, the best depth has the most expected tokens per second; after that, the shortest expected time until the last
text ends. It may be 0. The module reads no clock and draws no random numbers.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

HYSTERESIS = 0.02
"""Smallest relative gain in speed for which the depth is changed."""
# Costs: the depth that is measured beside plain rounds, and in how many rounds, for one row and for a batch, where
# drafts may take three times as long; rounds of a plain estimate, rounds kept, and rounds until an estimate is dropped.
_ONE_ROW, _BATCH, _PLAIN_ROUNDS, _WINDOW_ROUNDS, _STALE_ROUNDS = (3, 4), (2, 2), 4, 16, 512
# Acceptance: the weight of a prior mean, in rounds, limits what a wrong prior costs. A run of rejections less likely
# than _SURPRISE says that the text has changed.
_FIRST_GUESS, _LEAST_PRIOR, _PRIOR_WEIGHT, _SURPRISE = 0.7, 0.4, 0.75, 0.001
_DECODER_MEMORY_ROUNDS, _REQUEST_MEMORY_ROUNDS = 200, 50
# While nothing is drafted, one draft tries the text every so often, for at most a share of the time.
_PROBE_GAP_ROUNDS, _PROBE_SHARE = 16, 0.005
# One slow round, on a busy machine, has little effect on a lower median.
_typical = statistics.median_low


class RoundCosts:
    """Seconds of a round by batch rows and depth, shared by all requests of a decoder."""

    def __init__(self) -> None:
        # By rows and depth, the number and the seconds of the last rounds.
        self._sizes: defaultdict[int, dict[int, deque[tuple[int, float]]]] = defaultdict(dict)

    def observe(self, num_rows: int, depth: int, seconds: float) -> None:
        """Record the time of one round; 0 seconds, from a coarse clock, are ignored."""
        if seconds > 0.0:
            recent = self._sizes[num_rows]
            now = 1 + max((rounds[-1][0] for rounds in recent.values()), default=0)
            recent.setdefault(depth, deque(maxlen=_WINDOW_ROUNDS)).append((now, seconds))
            for stale in [one for one, rounds in recent.items() if now - rounds[-1][0] >= _STALE_ROUNDS]:
                del recent[stale]

    def depth_to_measure(self, num_rows: int, max_depth: int) -> int | None:
        """Return a depth to measure before depths can be compared; None if 0 and another are known."""
        known = self._known(num_rows)
        if 0 not in known:
            return 0
        return min((_ONE_ROW if num_rows == 1 else _BATCH)[0], max_depth) if len(known) == 1 else None

    def curve(self, num_rows: int, max_depth: int) -> list[float]:
        """Return the seconds of a round at depths 0 to ``max_depth``: measured, or on a line through two measured."""
        known = self._known(num_rows)
        deepest = max(known)
        # A negative slope is noise: depth is never a gift.
        slope = max((known[deepest] - known[0]) / deepest, 0.0)
        return [known.get(depth, known[0] + slope * depth) for depth in range(max_depth + 1)]

    def _known(self, num_rows: int) -> dict[int, float]:
        """Return the estimates of a batch size; of the next larger one if that is complete, as texts end."""
        complete = [size for size in self._sizes if size >= num_rows and len(self._known_of(size)) > 1]
        return self._known_of(min(complete, default=num_rows))

    def _known_of(self, size: int) -> dict[int, float]:
        needed = (_ONE_ROW if size == 1 else _BATCH)[1]
        return {
            depth: _typical([seconds for _, seconds in rounds])
            for depth, rounds in self._sizes[size].items()
            if len(rounds) >= (needed if depth else _PLAIN_ROUNDS)
        }


class Acceptance:
    """Running conditional acceptance by draft position, with exponential forgetting (means and weights of Beta priors).

    Positions are reached in order; those never reached are assumed to equal the last one observed.
    """

    def __init__(self, means: Sequence[float] = (_FIRST_GUESS,), memory_rounds: int = _DECODER_MEMORY_ROUNDS) -> None:
        self._means, self._weights, self._memory = list(means), [_PRIOR_WEIGHT] * len(means), memory_rounds

    def for_request(self) -> Acceptance:
        """Return the prior of a new request: these means, but high enough that drafts are tried."""
        return Acceptance([max(mean, _LEAST_PRIOR) for mean in self._means], _REQUEST_MEMORY_ROUNDS)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record one round. Drafts after the first rejected one were not judged."""
        self._weights = [max(weight * (1.0 - 1.0 / self._memory), _PRIOR_WEIGHT) for weight in self._weights]
        for position in range(min(num_drafted, num_accepted + 1)):
            if position == len(self._means):
                self._means.append(self._means[-1])
                self._weights.append(_PRIOR_WEIGHT)
            self._weights[position] += 1.0
            self._means[position] += (float(position < num_accepted) - self._means[position]) / self._weights[position]
        # Bad luck must not exclude a position for good: one that is not tried moves towards the one before.
        for position in range(num_drafted, len(self._means) if num_drafted else 0):
            self._means[position] += (self._means[position - 1] - self._means[position]) / self._memory

    def distrust(self) -> None:
        self._weights = [_PRIOR_WEIGHT] * len(self._weights)

    def conditional(self, depth: int) -> list[float]:
        """Return the estimate for each of the first ``depth`` positions."""
        return [*self._means, *[self._means[-1]] * (depth - len(self._means))][:depth]


class DepthController:
    """The acceptance of one request, drafting at most ``max_depth``; ``prior`` is shared with other requests."""

    def __init__(self, max_depth: int, prior: Acceptance) -> None:
        self.max_depth = max_depth
        self.settled: int | None = None
        self.rounds_unprobed = 0
        self._prior = prior
        self._own = self._prior.for_request()
        self._run_chance = 1.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record one round of this request, also a round without drafts."""
        self.rounds_unprobed += 1
        if num_drafted:
            self._run_chance = 1.0 if num_accepted else self._run_chance * (1.0 - self._own.conditional(1)[0])
            if self._run_chance < _SURPRISE:
                self._own.distrust()
                self._run_chance = 1.0
            self._prior.observe(num_drafted, num_accepted)
        self._own.observe(num_drafted, num_accepted)

    def expected_tokens(self, depth: int) -> list[float]:
        """Return the expected tokens of rounds with 0 to ``depth`` drafts; drafts beyond ``max_depth`` add nothing."""
        chances = [*self._own.conditional(self.max_depth), *[0.0] * depth][:depth]
        return list(accumulate(accumulate(chances, mul), initial=1.0))


def batch_depth(
    controllers: Sequence[DepthController],
    costs: RoundCosts,
    num_rows: int,
    max_depth: int,
    tokens_left: Sequence[int] | None = None,
) -> int:
    """Return the depth of the next round for rows that share one window.

    Args:
        controllers: One for each row, at least one; a row that must not draft has ``max_depth`` 0.
        costs: The decoder's costs; the caller adds the time of each round.
        num_rows: Number of batch rows that the costs are looked up by.
        max_depth: Largest number of drafts of the window.
        tokens_left: Tokens until the limit of each row, at least 1; None while further requests wait for a row.
    """
    max_depth = min(max_depth, max(controller.max_depth for controller in controllers))
    if max_depth <= 0:
        return 0
    if (unmeasured := costs.depth_to_measure(num_rows, max_depth)) is not None:
        return unmeasured
    seconds = costs.curve(num_rows, max_depth)
    by_depth = list(zip(*(each.expected_tokens(max_depth) for each in controllers), strict=True))
    if tokens_left is None:
        progress = [sum(tokens) for tokens in by_depth]
    else:
        progress = [min(one / left for one, left in zip(tokens, tokens_left, strict=True)) for tokens in by_depth]
    speeds = [made / taken for made, taken in zip(progress, seconds, strict=True)]
    chosen = _choose(speeds, max((each.settled for each in controllers if each.settled is not None), default=None))
    for each in controllers:
        each.rounds_unprobed = each.rounds_unprobed if each.settled == chosen else 0
        each.settled = chosen
    gap = max(_PROBE_GAP_ROUNDS, (seconds[1] / seconds[0] - 1.0) / _PROBE_SHARE)
    if chosen or max(each.rounds_unprobed for each in controllers if each.max_depth) < gap:
        return chosen
    for each in controllers:
        each.rounds_unprobed = 0
    return 1


def _choose(speeds: Sequence[float], settled: int | None) -> int:
    """Return the fastest depth; the current depth if it is hardly slower; 0 if drafts gain nothing."""
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    stay = fastest if settled is None else min(settled, len(speeds) - 1)
    chosen = fastest if speeds[fastest] > (1.0 + HYSTERESIS) * speeds[stay] else stay
    # While rounds draft, the cost of plain decoding is renewed least often: a tie with it is more likely a loss.
    return chosen if speeds[chosen] > (1.0 + HYSTERESIS / 2.0) * speeds[0] else 0
