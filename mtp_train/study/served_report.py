"""What is made of a server's responses: cells beside those of in-process arms, speeds and latencies.

Two readings of one figure. ``tokens_per_second`` of a cell is what one reader gets, prefill included, as in process:
tokens over the sum of the requests' seconds. The throughput of the server, over the wall clock with all requests at a
time, stands in the document.

Where a server does not tell what it accepts, its decoding speed is taken from responses of two lengths to the same
prompt: ``(n2 - n1) / (d2 - d1)``, n tokens in d seconds *behind the first piece*. Milliseconds a token of one response
are confounded by prefill, and by how many tokens its first piece held, which such a server does not say either; both
are the same in the two, and drop out. Intervals are over groups of prompts, as those of in-process arms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from mtp_train.acceptance import Interval, repeated_ngram_share
from mtp_train.acceptance_intervals import pooled_tau_interval, ratio_interval, sum_by_group
from mtp_train.report.cells import Cell
from mtp_train.report.schema import ArmResult
from mtp_train.study.served_asking import Answered
from mtp_train.study.served_metrics import NOTHING, SpecCounts

ARM = "served"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The least that the server's figures tell apart: one prompt, or several that were asked together."""

    answered: tuple[Answered, ...]
    counts: SpecCounts | None
    """None where the server does not tell what it accepts."""


def make_cell(
    units: Sequence[Unit], *, task: str, temperature: float, model: str, url: str, drafts: bool | None
) -> Cell:
    """Return the cell of one task at one temperature, or of all tasks.

    Args:
        units: What was asked and counted; at least one response.
        task: Its name.
        temperature: Of the sampling.
        model: The model that answered.
        url: The server.
        drafts: Whether the server drafts; None where it does not tell.
    """
    answered = [one for unit in units for one in unit.answered]
    counts = _pooled(units)
    return Cell(
        arm=ARM,
        task=task,
        temperature=temperature,
        context_tokens=None,
        depth=counts.depth if counts is not None else 0,
        # At temperature 0 every rule comes to this; above, the server's setting decides, and it does not tell.
        rule="none" if drafts is False else "greedy" if drafts and temperature == 0.0 else "served",
        trunk=model,
        head=None if drafts is False else url,
        **_acceptance(units, counts, drafts),
        dense=None,
        overlap=None,
        target_entropy=None,
        repeated_8gram_share=repeated_ngram_share([one.token_ids for one in answered]),
        tokens_per_second=_ratio(sum(one.tokens for one in answered), sum(one.streamed.seconds for one in answered)),
        speedup=None,
        prompts=len(answered),
        groups=len(set(_groups(units))),
        measured_here=True,
        new_tokens=sum(one.tokens for one in answered),
        mean_prompt_tokens=sum(len(one.prompt.prompt_ids) for one in answered) / len(answered),
        seconds_prefill=_mean([one.seconds_first for one in answered]),
        round_seconds=_round_seconds(answered, counts),
        break_even_tau=None,
        break_even_acceptance=None,
    )


def as_arm(cell: Cell) -> ArmResult:
    """Return what a report's table of arms shows of a cell."""
    return ArmResult(**{field.name: getattr(cell, field.name) for field in fields(ArmResult)})


def _pooled(units: Sequence[Unit]) -> SpecCounts | None:
    told = [unit.counts for unit in units if unit.counts is not None]
    return reduce(SpecCounts.__add__, told, NOTHING) if len(told) == len(units) else None


def _acceptance(units: Sequence[Unit], counts: SpecCounts | None, drafts: bool | None) -> dict[str, Any]:
    """Return the fields that tell of drafts."""
    none = dict.fromkeys(("tau_ci95", "acceptance_rate", "marginal", "conditional", "accepted_histogram"))
    if counts is None or not counts.rounds:
        plain = 1.0 if drafts is False or counts is not None else None
        return {**none, "tau": plain, "tau_macro": plain, "rounds": None, "draft_tokens": 0, "accepted_tokens": 0}
    alone = [unit for unit in units if len(unit.answered) == 1]
    single = [unit.counts for unit in alone if unit.counts is not None]
    by_prompt = len(single) == len(units)
    reached = counts.accepted_per_pos
    chain = None if reached is None else (counts.rounds, *reached)
    return {
        "tau": counts.tau,
        "tau_ci95": _tau_interval(single, _groups(alone), counts.depth) if by_prompt else None,
        "tau_macro": float(np.mean([one.tau for one in single if one.rounds])) if by_prompt else None,
        "acceptance_rate": _ratio(counts.accepted_tokens, counts.draft_tokens),
        "marginal": None if reached is None else tuple(share / counts.rounds for share in reached),
        "conditional": None if chain is None else tuple(_ratio(later, earlier) for earlier, later in pairwise(chain)),
        "accepted_histogram": None if chain is None else tuple(a - b for a, b in pairwise((*chain, 0))),
        "rounds": counts.rounds,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
    }


def _tau_interval(counts: Sequence[SpecCounts], groups: Sequence[str], depth: int) -> Interval | None:
    totals_P2 = np.array([(one.accepted_tokens, one.rounds) for one in counts], dtype=np.float64)
    accepted_G, rounds_G = sum_by_group(totals_P2, groups).T
    return pooled_tau_interval(accepted_G, rounds_G, depth)


def _groups(units: Sequence[Unit]) -> list[str]:
    """Return the group of every response's prompt."""
    return [one.prompt.group for unit in units for one in unit.answered]


def _round_seconds(answered: Sequence[Answered], counts: SpecCounts | None) -> float | None:
    """Return the mean seconds of a round; without rounds, of a token."""
    if counts is not None and counts.rounds:
        return _ratio(sum(one.seconds_decode or 0.0 for one in answered), counts.rounds)
    timed = [one for one in answered if one.tokens_decode is not None]
    return _ratio(sum(one.seconds_decode or 0.0 for one in timed), sum(one.tokens_decode or 0 for one in timed))


def latencies(answered: Sequence[Answered]) -> dict[str, Any]:
    """Return percentiles in milliseconds: to the first piece, between pieces, and a token behind the first piece.

    The last is a mean of each response, its percentiles are over responses: the tokens of a round come at one time, in
    one piece or in several with nothing between them. None where the server does not say what the first piece held.
    """
    gaps = [later.seconds - earlier.seconds for one in answered for earlier, later in pairwise(one.streamed.arrivals)]
    timed = [one for one in answered if one.tokens_decode]
    return {
        "first_token_ms": _percentiles([one.seconds_first for one in answered if one.seconds_first is not None]),
        "between_pieces_ms": _percentiles(gaps),
        "per_token_ms": _percentiles([(one.seconds_decode or 0.0) / (one.tokens_decode or 1) for one in timed]),
    }


def two_lengths(short: Sequence[Answered], long: Sequence[Answered]) -> dict[str, Any] | None:
    """Return the decoding speed between two lengths of the same prompts' responses, and its interval.

    Returns:
        Milliseconds a token, tokens a second, their intervals and the prompts they rest on; None where no prompt has
        two lengths, or the server does not stream.
    """
    first = {one.prompt.id: one for one in short}
    pairs = [(first[one.prompt.id], one) for one in long if one.prompt.id in first]
    tokens, seconds, groups = [], [], []
    for brief, whole in pairs:
        if brief.seconds_decode is None or whole.seconds_decode is None or whole.tokens <= brief.tokens:
            continue
        tokens.append(whole.tokens - brief.tokens)
        seconds.append(whole.seconds_decode - brief.seconds_decode)
        groups.append(whole.prompt.group)
    if not tokens or sum(seconds) <= 0.0:
        return None
    seconds_G, tokens_G = sum_by_group(np.array([seconds, tokens], dtype=np.float64).T, groups).T
    interval = ratio_interval(seconds_G, tokens_G, 0.0, math.inf)
    known = interval is not None and interval[0] > 0.0
    return {
        "prompts": len(tokens),
        "groups": len(tokens_G),
        "tokens": sum(tokens),
        "ms_per_token": 1000.0 * sum(seconds) / sum(tokens),
        "ms_per_token_ci95": [1000.0 * limit for limit in interval] if interval is not None else None,
        "tokens_per_second": sum(tokens) / sum(seconds),
        "tokens_per_second_ci95": [1.0 / interval[1], 1.0 / interval[0]] if interval is not None and known else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = 1000.0 * np.array(seconds)
    return {"mean": float(values.mean())} | {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
