"""Read draft counts from a server: counters of the whole server, or figures in a response.

Definitions as in :mod:`mtp_train.acceptance.counts`: a round is one verification, accepted tokens exclude the bonus
token, ``tau = 1 + accepted / rounds``, positions are marginal. Sources of each engine, found in its code:

- vLLM: ``/metrics`` (``vllm:spec_decode_num_drafts_total`` and similar, one series per engine), and with
  ``--per-request-spec-decode-metrics`` a histogram in each response.
- llama.cpp: the same counters as ``llamacpp:...`` with ``--metrics``, rounded to six digits; in each response
  ``timings`` with drafted and accepted tokens, without rounds.
- SGLang: fields in each response of ``/generate``, whose names changed twice. ``spec_accept_length`` divides all
  tokens, including the prefill's token, by the rounds, and the gauges cover a window of time: neither is used.

Shapes: K draft positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

from mtp_train.errors import DataError

PREFIXES = {"vllm": "vllm:", "llamacpp": "llamacpp:"}
"""Server (``owned_by`` in its list of models) to the prefix of its counters."""
GENERATED = {"vllm": "vllm:generation_tokens", "llamacpp": "llamacpp:tokens_predicted"}
"""Server to its counter of all generated tokens."""
ROUNDED_FROM = {"llamacpp": 1_000_000}
"""Server to the value above which it rounds its counters."""
SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+\d+)?$")
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class SpecCounts:
    """Numbers of rounds, drafted tokens and accepted tokens."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...] | None
    """Rounds that accepted at least ``i + 1`` drafts, shape (K,); None where the server does not report it."""
    inferred: bool = False
    """Whether the rounds are inferred rather than counted by the server (:func:`_llama_counts`)."""

    def __add__(self, other: SpecCounts) -> SpecCounts:
        """Return the sum of both counts."""
        known = self.accepted_per_pos is not None and other.accepted_per_pos is not None
        pairs = zip_longest(self.accepted_per_pos or (), other.accepted_per_pos or (), fillvalue=0)
        return SpecCounts(
            rounds=self.rounds + other.rounds,
            draft_tokens=self.draft_tokens + other.draft_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            accepted_per_pos=tuple(map(sum, pairs)) if known else None,
            inferred=self.inferred or other.inferred,
        )

    @property
    def tau(self) -> float:
        """Mean tokens committed per round; 1.0 where nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else 1.0

    @property
    def depth(self) -> int:
        """The most drafts per round, at least the mean rounded up."""
        most = -(-self.draft_tokens // self.rounds) if self.rounds else 0
        return max(most, len(self.accepted_per_pos or ()))


NOTHING = SpecCounts(rounds=0, draft_tokens=0, accepted_tokens=0, accepted_per_pos=())


@dataclass(frozen=True, kw_only=True)
class Counters:
    """A server's counters at one moment, or their increase between two moments."""

    series: Mapping[tuple[str, str], float]
    """(Name without ``_total``, labels) to value."""
    server: str

    @property
    def generated(self) -> int | None:
        """Tokens generated for all clients; None where the server does not count them."""
        return self._sum(GENERATED[self.server])

    @property
    def drafts(self) -> SpecCounts | None:
        """Drafts for all clients; None where the server does not count drafts, for example because it makes none."""
        name = f"{PREFIXES[self.server]}spec_decode_num_"
        rounds = self._sum(name + "drafts")
        if rounds is None:
            return None
        per_pos: dict[int, int] = {}
        for (series, labels), value in self.series.items():
            position = POSITION.search(labels)
            if series == name + "accepted_tokens_per_pos" and position is not None:
                per_pos[int(position[1])] = per_pos.get(int(position[1]), 0) + int(value)
        return SpecCounts(
            rounds=rounds,
            draft_tokens=self._sum(name + "draft_tokens") or 0,
            accepted_tokens=self._sum(name + "accepted_tokens") or 0,
            # llama.cpp leaves out positions without an accepted draft.
            accepted_per_pos=tuple(per_pos.get(position, 0) for position in range(max(per_pos, default=-1) + 1)),
        )

    def since(self, before: Counters) -> Counters:
        """Return the increase of the counters since an earlier moment.

        Raises:
            DataError: A counter decreased or is missing, because the server was restarted; or the counters are rounded.
        """
        gained = {key: value - before.series.get(key, 0.0) for key, value in self.series.items()}
        fallen = [key for key in before.series if gained.get(key, -1.0) < 0.0]
        if fallen:
            name, labels = fallen[0]
            found = self.series.get(fallen[0])
            raise DataError(
                f"the server's counter {name}{labels} was {before.series[fallen[0]]:.0f} and is now "
                f"{'missing' if found is None else f'{found:.0f}'}; expected it to rise only. The server was "
                "restarted during the measurement: run the command again."
            )
        limit = ROUNDED_FROM.get(self.server)
        if limit is not None and max(self.series.values(), default=0.0) >= limit:
            raise DataError(
                f"the server's counters are above {limit}, where it rounds them; expected exact counters. Restart the "
                "server, then run the command again."
            )
        return Counters(series=gained, server=self.server)

    def _sum(self, name: str) -> int | None:
        """Return a counter summed over engines and models."""
        values = [value for (series, _), value in self.series.items() if series == name]
        return int(sum(values)) if values else None


def read_counters(text: str, server: str) -> Counters:
    """Return the counters of drafts and tokens from the text of ``/metrics``.

    Args:
        text: Text in the Prometheus exposition format.
        server: A key of :data:`PREFIXES`.
    """
    wanted = (f"{PREFIXES[server]}spec_decode_num_", GENERATED[server])
    series = {}
    for line in text.splitlines():
        found = SERIES.match(line)
        if found is None or not found[1].startswith(wanted) or found[1].endswith("_created"):
            continue
        series[found[1].removesuffix("_total"), found[2] or ""] = float(found[3])
    return Counters(series=series, server=server)


def response_counts(document: Mapping[str, Any], new_tokens: int) -> SpecCounts | None:
    """Return the draft counts in one response; None where it has none.

    Args:
        document: The response.
        new_tokens: Number of its new tokens, as counted by the server.
    """
    for name, read in (("metrics", _vllm_counts), ("meta_info", _sglang_counts)):
        told = document.get(name)
        counts = read(told) if isinstance(told, dict) else None
        if counts is not None:
            return counts
    timings = document.get("timings")
    return _llama_counts(timings, new_tokens) if isinstance(timings, dict) else None


def _vllm_counts(metrics: Mapping[str, Any]) -> SpecCounts | None:
    told = metrics.get("speculative_decoding")
    if not isinstance(told, dict):
        return None
    return _from_histogram(told["acceptance_histogram"], int(told["num_draft_tokens"]))


def _sglang_counts(told: Mapping[str, Any]) -> SpecCounts | None:
    accepted = _first(told, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = _first(told, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    rounds = told.get("spec_verify_ct")
    if accepted is None or drafted is None or rounds is None:
        return None
    histogram = _first(told, "spec_correct_drafts_histogram", "spec_accept_histogram") or ()
    counts = _from_histogram(histogram, int(drafted))
    if (counts.rounds, counts.accepted_tokens) == (rounds, accepted):
        return counts
    # There is no histogram, or one of another quantity.
    return SpecCounts(
        rounds=int(rounds), draft_tokens=int(drafted), accepted_tokens=int(accepted), accepted_per_pos=None
    )


def _llama_counts(timings: Mapping[str, Any], new_tokens: int) -> SpecCounts | None:
    """Return counts with inferred rounds: every token that is neither accepted nor the first came from its own round.

    This counts rounds without a draft too, and counts too few rounds where drafts past the end of the text were
    accepted. So tau can be off in either direction. With ``--metrics`` nothing is inferred.
    """
    if "draft_n" not in timings:
        return None
    accepted = int(timings["draft_n_accepted"])
    return SpecCounts(
        rounds=max(new_tokens - 1 - accepted, 1 if accepted else 0),
        draft_tokens=int(timings["draft_n"]),
        accepted_tokens=accepted,
        accepted_per_pos=None,
        inferred=True,
    )


def _from_histogram(rounds_by_accepted: Sequence[int], draft_tokens: int) -> SpecCounts:
    """Return counts from a histogram whose entry j is the number of rounds that accepted exactly j drafts."""
    reached = tuple(reversed(tuple(accumulate(reversed(rounds_by_accepted)))))
    return SpecCounts(
        rounds=reached[0] if reached else 0,
        draft_tokens=draft_tokens,
        accepted_tokens=sum(reached[1:]),
        accepted_per_pos=reached[1:],
    )


def _first(told: Mapping[str, Any], *names: str) -> Any:
    """Return the value under the first name that is present."""
    return next((told[name] for name in names if told.get(name) is not None), None)
