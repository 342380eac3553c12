"""What a server says of its own drafts: counters of the whole server, or figures beside a response.

Definitions are those of :mod:`mtp_train.acceptance`: a round is one verification, the bonus token is not among the
accepted ones, ``tau = 1 + accepted / rounds``, positions are marginal. What each engine offers, read in its source:

- vLLM: ``/metrics`` (``vllm:spec_decode_num_drafts_total`` and the like, one series an engine), and with
  ``--per-request-spec-decode-metrics`` a histogram beside each response.
- llama.cpp: the same counters as ``llamacpp:...`` with ``--metrics``, rounded to six digits; beside each response
  ``timings`` with drafted and accepted tokens, without rounds.
- SGLang: beside each response of ``/generate``, under three generations of names. Its ``spec_accept_length`` divides
  all tokens, the prefill's among them, by the rounds, and its gauges cover a window of time: neither is used.

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
"""Server, as its list of models names it, to what its counters begin with."""
GENERATED = {"vllm": "vllm:generation_tokens", "llamacpp": "llamacpp:tokens_predicted"}
"""Server to its counter of all tokens said."""
ROUNDED_FROM = {"llamacpp": 1_000_000}
"""Server to the value from which its counters are no longer exact."""
SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+\d+)?$")
POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class SpecCounts:
    """What was drafted and accepted."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...] | None
    """Rounds that accepted at least ``i + 1`` drafts, shape (K,); None where the server does not say."""
    inferred: bool = False
    """Whether the rounds are not the server's own count (:func:`_llama_counts`)."""

    def __add__(self, other: SpecCounts) -> SpecCounts:
        """Pool two."""
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
        """The most drafts of a round."""
        most = -(-self.draft_tokens // self.rounds) if self.rounds else 0
        return max(most, len(self.accepted_per_pos or ()))


NOTHING = SpecCounts(rounds=0, draft_tokens=0, accepted_tokens=0, accepted_per_pos=())


@dataclass(frozen=True, kw_only=True)
class Counters:
    """A server's counters at one moment, or what they gained since another."""

    series: Mapping[tuple[str, str], float]
    """Name, without ``_total``, and labels to value."""
    server: str

    @property
    def generated(self) -> int | None:
        """Tokens said to anybody; None where it does not count them."""
        return self._sum(GENERATED[self.server])

    @property
    def drafts(self) -> SpecCounts | None:
        """What was drafted for anybody; None where the server does not count drafts, as one that makes none."""
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
            # llama.cpp shows no position before it has accepted something there.
            accepted_per_pos=tuple(per_pos.get(position, 0) for position in range(max(per_pos, default=-1) + 1)),
        )

    def since(self, before: Counters) -> Counters:
        """Return what was counted since another moment.

        Raises:
            DataError: A counter fell or is gone: the server was started again between the two. Or it is rounded.
        """
        gained = {key: value - before.series.get(key, 0.0) for key, value in self.series.items()}
        fallen = [key for key in before.series if gained.get(key, -1.0) < 0.0]
        if fallen:
            name, labels = fallen[0]
            found = self.series.get(fallen[0])
            raise DataError(
                f"the server's counter {name}{labels} stood at {before.series[fallen[0]]:.0f} and now "
                f"{'is gone' if found is None else f'at {found:.0f}'}; expected it to rise alone. The server was "
                "started again while it was measured: run the command again."
            )
        limit = ROUNDED_FROM.get(self.server)
        if limit is not None and max(self.series.values(), default=0.0) >= limit:
            raise DataError(
                f"the server's counters stand above {limit}, from where it rounds them; expected exact ones. Start the "
                "server again, then run the command again."
            )
        return Counters(series=gained, server=self.server)

    def _sum(self, name: str) -> int | None:
        """Return a counter summed over engines and models."""
        values = [value for (series, _), value in self.series.items() if series == name]
        return int(sum(values)) if values else None


def read_counters(text: str, server: str) -> Counters:
    """Read those counters out of what ``/metrics`` shows that tell of drafts and tokens.

    Args:
        text: Prometheus' exposition format.
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
    """Return what the server says of its drafts beside one response; None where it says nothing.

    Args:
        document: The response.
        new_tokens: Tokens of it, as the server counts them.
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
    # Without a histogram, or with one of something else.
    return SpecCounts(
        rounds=int(rounds), draft_tokens=int(drafted), accepted_tokens=int(accepted), accepted_per_pos=None
    )


def _llama_counts(timings: Mapping[str, Any], new_tokens: int) -> SpecCounts | None:
    """Return counts of which the rounds are inferred: what was not accepted and is not the first came from one each.

    Rounds without a draft count as well, and where drafts past the end of the text were accepted too few do: tau may be
    off either way. With ``--metrics`` nothing needs to be inferred.
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
    """Return the counts of a histogram: entry j holds the rounds that accepted exactly j drafts."""
    reached = tuple(reversed(tuple(accumulate(reversed(rounds_by_accepted)))))
    return SpecCounts(
        rounds=reached[0] if reached else 0,
        draft_tokens=draft_tokens,
        accepted_tokens=sum(reached[1:]),
        accepted_per_pos=reached[1:],
    )


def _first(told: Mapping[str, Any], *names: str) -> Any:
    """Return the value under the first of the names that is there."""
    return next((told[name] for name in names if told.get(name) is not None), None)
