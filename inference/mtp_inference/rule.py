"""Decide again, from what was recorded, which tokens a text has to have: an independent statement of the rule.

Nothing here is shared with the decoder but the random numbers, which depend on a request's seed and the position.
Greedy decisions have no tolerance. A sampled token has none beyond :data:`SUMMATION`, the error of sums over a
vocabulary.

Shapes: T tokens of a window, P positions of a text.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtp_inference.record import FloatArray, RoundRecord, TextRecord
from mtp_inference.sampling.distributions import ACCEPT, TOKEN, uniform

SUMMATION = 1e-4
"""Largest error of a cumulative distribution in fp32, as a share of its total. A sum of 250,000 numbers one by one errs
by 2e-5 at most in practice."""
NO_TOKEN = -1


def first_broken(tokens: tuple[int, ...], record: TextRecord) -> int | None:
    """Return the index of the first new token that the rule does not give; None if the whole text is the rule's.

    A text that ends too early or too late is broken where it should go on, or should have ended.
    """
    num_tokens = 0
    for token in _required(record):
        if tokens[num_tokens : num_tokens + 1] != (token,):
            break
        num_tokens += 1
        if token in record.stops or num_tokens == record.max_new_tokens:
            return None if len(tokens) == num_tokens else num_tokens
    return num_tokens


def _required(record: TextRecord) -> Iterator[int]:
    """Yield the tokens of all rounds; end with no token where a round committed another number of them."""
    last = record.prompt_ids[-1]
    place = 0
    draws, accepts = (_numbers(record, stream) for stream in (TOKEN, ACCEPT))
    for one in record.rounds:
        if one.window[0] != last:
            return
        if record.sampling.temperature == 0.0:
            found = list(_greedy(one))
        else:
            found = list(_sampled(one, draws[place:], accepts[place:]))
        yield from found if len(found) == one.num_kept else [NO_TOKEN]
        last = found[-1]
        place += len(found)


def _numbers(record: TextRecord, stream: int) -> FloatArray:
    """Return the random numbers of a stream from the first new token on, (P,), for more tokens than the text has."""
    num_positions = sum(len(one.tokens) for one in record.rounds)
    position_1P = len(record.prompt_ids) + torch.arange(num_positions)[None]
    return uniform(torch.tensor([record.sampling.seed]), position_1P, stream)[0].numpy()


def _greedy(one: RoundRecord) -> Iterator[int]:
    """Yield the drafts that are the trunk's own first choice, then the first choice that is not a draft."""
    for row, draft in enumerate(_drafts(one)):
        own = _largest(one, row)
        yield own
        if own != draft:
            return


def _sampled(one: RoundRecord, draws: FloatArray, accepts: FloatArray) -> Iterator[int]:
    """Yield the accepted drafts, then a token that is drawn."""
    for row, draft in enumerate(_drafts(one)):
        low, high, p, q = one.draws[row]
        # A draft that was not drawn from a distribution has no probability in it.
        is_own = draft == NO_TOKEN or q == 0.0
        # With probability min(1, p / q).
        is_accepted = not is_own and accepts[row] * q < p
        # The random number has to lie in the interval of the round's token.
        lies_inside = low - SUMMATION <= draws[row] <= high + SUMMATION and high > low
        token = draft if is_accepted else one.tokens[row] if lies_inside else NO_TOKEN
        yield token
        if not (is_accepted or (is_own and token == draft)):
            return


def _drafts(one: RoundRecord) -> list[int]:
    """Return the drafts that could be accepted, and no token after the last."""
    return [*one.window[1 : 1 + one.limit], NO_TOKEN]


def _largest(one: RoundRecord, row: int) -> int:
    """Return the token with the largest logit, the first of the vocabulary if several have it."""
    best = one.best
    ids_N = best.ids_PN[row]
    values_N = best.values_PN[row]
    ties = ids_N[values_N == values_N[0]]
    # If all that were recorded tie, others may too.
    return one.tokens[row] if len(ties) == len(ids_N) and one.tokens[row] in ties else int(ties.min())
