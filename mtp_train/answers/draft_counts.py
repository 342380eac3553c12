"""Counts of drafts that servers report.

Definitions as in :mod:`mtp_train.acceptance.counts`: a round is one verification, accepted tokens exclude the bonus
token, positions are marginal. Sources, found in the engines' code:

- vLLM, and llama-server with ``--metrics``: counters of the whole server at ``/metrics``, one series per engine.
- SGLang: fields in each response of ``/generate``, whose names changed twice. ``spec_accept_length`` counts the
  prefill's token, and the gauges cover a window of time: neither is used.
- llama-server: ``timings`` in each response. They have no rounds: those are the tokens less the first and the accepted
  ones. Drafts accepted behind an end-of-text token are in no token, so that a text may have one or two rounds more.

Shapes: K draft positions.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

from mtp_train.checkpoints.files import JsonObject
from mtp_train.errors import DataError

COUNTING = ("vllm", "llamacpp")
"""Servers (``owned_by`` in their list of models) with counters."""
ROUNDED_FROM = 1_000_000
"""llama-server rounds its counters above this value."""
GENERATED = ("generation_tokens", "tokens_predicted")
"""Names of the counter of all generated tokens."""
_DRAFTS = "spec_decode_num_"
_SERIES = re.compile(
    rf"^(?:vllm|llamacpp):({'|'.join(GENERATED)}|{_DRAFTS}\w+?)(?:_total)?(\{{.*\}})?\s+(\S+)(?:\s+\d+)?$"
)
_POSITION = re.compile(r'position="(\d+)"')
Counters = Mapping[tuple[str, str], float]
"""(Name, labels) to value."""


@dataclass(frozen=True, kw_only=True)
class SpecCounts:
    """Numbers of rounds, drafted tokens and accepted tokens."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] | None = ()
    """Rounds that accepted at least ``i + 1`` drafts, shape (K,); None where the server does not report it."""

    def __add__(self, other: SpecCounts) -> SpecCounts:
        per_pos = None
        if self.accepted_per_pos is not None and other.accepted_per_pos is not None:
            per_pos = tuple(map(sum, zip_longest(self.accepted_per_pos, other.accepted_per_pos, fillvalue=0)))
        return SpecCounts(
            rounds=self.rounds + other.rounds,
            draft_tokens=self.draft_tokens + other.draft_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            accepted_per_pos=per_pos,
        )

    def rounds_of(self, tokens: int, prompts: int = 1) -> int:
        """Return the rounds in which the new tokens of prompts were made, those without drafts too.

        vLLM counts only rounds with drafts, which an n-gram lookup has not in every round.
        """
        return max(self.rounds, tokens - prompts - self.accepted_tokens)

    @property
    def depth(self) -> int:
        """The most drafts per round, at least the mean rounded up."""
        # The rounds of llama-server's timings may be a few too low.
        most = math.ceil(self.draft_tokens / self.rounds - 0.1) if self.rounds else 0
        return max(most, len(self.accepted_per_pos or ()))


def read_counters(text: str) -> Counters:
    """Return the counters of drafts and of generated tokens from the text of ``/metrics``."""
    return {
        (match[1], match[2] or ""): float(match[3])
        for match in filter(None, map(_SERIES.match, text.splitlines()))
        if not match[1].endswith("_created")
    }


def increase(before: Counters, now: Counters, server: str) -> tuple[int, SpecCounts]:
    """Return the tokens and the drafts of all clients between two readings of a server's counters.

    Raises:
        DataError: A counter decreased or is missing, because the server was restarted; or the counters are rounded.
    """
    gained = {key: value - before.get(key, 0.0) for key, value in now.items()}
    fallen = next((key for key in before if gained.get(key, -1.0) < 0.0), None)
    if fallen is not None:
        found = f"{now[fallen]:.0f}" if fallen in now else "missing"
        raise DataError(
            f"the server's counter {''.join(fallen)} was {before[fallen]:.0f} and is now {found}; expected it to rise "
            "only. The server was restarted during the measurement: run the command again."
        )
    if server == "llamacpp" and max(now.values(), default=0.0) >= ROUNDED_FROM:
        raise DataError(
            f"the server's counters are above {ROUNDED_FROM}, where it rounds them; expected exact counters. Restart "
            "the server, then run the command again."
        )
    totals = Counter[str]()
    reached = Counter[int]()
    for (name, labels), value in gained.items():
        totals[name] += int(value)
        if position := _POSITION.search(labels):
            reached[int(position[1])] += int(value)
    counts = SpecCounts(
        rounds=totals[f"{_DRAFTS}drafts"],
        draft_tokens=totals[f"{_DRAFTS}draft_tokens"],
        accepted_tokens=totals[f"{_DRAFTS}accepted_tokens"],
        accepted_per_pos=tuple(reached[position] for position in range(max(reached, default=-1) + 1)),
    )
    return sum(totals[name] for name in GENERATED), counts


def native_payload(payload: JsonObject) -> JsonObject:
    same = ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "skip_special_tokens")
    sampling = {name: payload[name] for name in same}
    sampling |= {"max_new_tokens": payload["max_tokens"], "sampling_seed": payload["seed"]}
    return {"input_ids": payload["prompt"], "sampling_params": sampling}


def as_object(value: object) -> JsonObject:
    """Return a value of a server's response that should be an object; empty if it is none."""
    return value if isinstance(value, dict) else {}


def as_completion(document: JsonObject) -> JsonObject:
    """Return a response of SGLang's ``/generate`` as a completion."""
    told = as_object(document.get("meta_info"))
    reason = as_object(told.get("finish_reason"))
    choice = {"text": document.get("text"), "token_ids": document.get("output_ids")}
    choice |= {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
    return {"choices": [choice], "usage": told, "meta_info": told}


def response_counts(document: JsonObject) -> SpecCounts | None:
    """Return the draft counts in a response of llama-server or of :func:`as_completion`; None where it has none."""
    if isinstance(timings := document.get("timings"), dict):
        tokens, drafted, accepted = (timings.get(name, 0) for name in ("predicted_n", "draft_n", "draft_n_accepted"))
        made = {"draft_tokens": drafted, "accepted_tokens": accepted, "accepted_per_pos": None}
        return SpecCounts(rounds=max(1, tokens - 1 - accepted), **made) if drafted else SpecCounts()
    told = document.get("meta_info") or {}
    accepted = _first(told, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = _first(told, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    rounds: Any = told.get("spec_verify_ct")
    if not told or None in (accepted, drafted, rounds):
        # Its fields are missing where nothing was drafted.
        return SpecCounts() if told else None
    histogram = _first(told, "spec_correct_drafts_histogram", "spec_accept_histogram") or ()
    reached = tuple(accumulate(reversed(histogram)))[::-1]
    # There may be no histogram, or one of another quantity.
    per_pos = reached[1:] if reached[:1] == (rounds,) and sum(reached[1:]) == accepted else None
    return SpecCounts(rounds=rounds, draft_tokens=drafted, accepted_tokens=accepted, accepted_per_pos=per_pos)


def _first(told: JsonObject, *names: str) -> Any:
    return next((told[name] for name in names if told.get(name) is not None), None)
