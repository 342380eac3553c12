"""Requests to the decoder, and its results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mtp_inference.record import TextRecord
from mtp_inference.sampling.distributions import GREEDY, Sampling
from mtp_train.errors import MtpError
from mtp_train.head_kinds import DEEPEST


class Round(NamedTuple):
    """Counts of one round (draft, verify, accept, commit) of one request."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The new tokens of one prompt, and the counts of the rounds that produced them.

    Prefill gives the first token, before the first round. Each round drafts exactly ``depth`` tokens; with
    ``mtp="auto"`` the decoder chooses how many. Accepted tokens past EOS or past the limit are counted and not
    returned, so ``1 + rounds + num_accepted_tokens`` may exceed ``len(token_ids)``.

    Example:
        >>> from mtp_inference import GenerationResult
        >>> from mtp_inference.requests import Round
        >>> result = GenerationResult(
        ...     token_ids=(5, 6, 7, 8),
        ...     depth=3,
        ...     round_log=(Round(num_drafted=3, num_accepted=2),),
        ...     seconds_prefill=0.1,
        ...     seconds_decode=0.2,
        ... )
        >>> result.num_accepted_tokens, result.tau
        (2, 3.0)
        >>> result
        GenerationResult(text='', finish_reason='length', depth=3, seconds_prefill=0.1, seconds_decode=0.2)
    """

    token_ids: tuple[int, ...] = field(repr=False)
    """New token ids only, the EOS that ended the text included."""
    text: str = ""
    """Their text; empty without a tokenizer."""
    finish_reason: Literal["stop", "length"] = "length"
    """``stop``: a stop token ended the text. ``length``: ``max_new_tokens`` did."""
    depth: int
    """Largest number of drafts per round."""
    round_log: tuple[Round, ...] = field(repr=False)
    """Counts of every round, in order."""
    seconds_prefill: float
    """Wall time until the first token is known, in seconds; includes the head's pass over the prompt."""
    seconds_decode: float
    """Wall time of all rounds, in seconds."""
    record: TextRecord | None = field(default=None, repr=False)
    """What the rounds decided on, for :func:`mtp_inference.compare`; None unless the decoder ``records`` it."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.round_log)

    @property
    def num_drafts(self) -> int:
        """Number of rounds, under the name of vLLM's counter."""
        return self.rounds

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of all rounds."""
        return sum(one.num_drafted for one in self.round_log)

    @property
    def accepted_per_pos(self) -> tuple[int, ...]:
        """Number of rounds that accepted at least ``i + 1`` drafts, one entry per depth; empty for plain decoding."""
        return tuple(sum(one.num_accepted > place for one in self.round_log) for place in range(self.depth))

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts, without bonus tokens."""
        return sum(self.accepted_per_pos)

    @property
    def tau(self) -> float:
        """Mean tokens committed per round, bonus token included: ``1 + accepted / rounds``; 1.0 without rounds."""
        return 1.0 + self.num_accepted_tokens / self.rounds if self.rounds else 1.0


MAX_DEPTH = DEEPEST
"""Largest number of drafts per round, unless the kind of the head has its own."""
MtpMode = Literal["on", "off", "auto"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt of token ids, with its settings.

    Example:
        >>> from mtp_inference import Request, Sampling
        >>> request = Request(prompt_ids=[4, 5], max_new_tokens=8, depth=2, sampling=Sampling(temperature=0.7, seed=1))
        >>> request.mtp
        'on'
    """

    prompt_ids: Sequence[int]
    """Token ids, at least one."""
    max_new_tokens: int
    """At least 1."""
    sampling: Sampling = GREEDY
    """How tokens are chosen; greedy by default."""
    mtp: MtpMode = "on"
    """``on`` drafts ``depth`` tokens every round, ``off`` none, ``auto`` the fastest number, up to ``depth``."""
    depth: int | None = None
    """Drafts per round; None for the decoder's depth."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the text, besides the decoder's ``eos_ids``. The token that ends the text is returned."""

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise MtpError("prompt: no token; expected at least one. Start it with the tokenizer's BOS token.")
        if self.max_new_tokens < 1:
            raise MtpError(f"max_new_tokens: {self.max_new_tokens}; expected 1 or more. Ask for at least one token.")
        if self.mtp not in ("on", "off", "auto"):
            raise MtpError(f"mtp: '{self.mtp}'; expected on, off or auto. Use on for a fixed depth.")
        if self.depth is not None:
            require_depth(self.depth, sys.maxsize)


Prompt = str | Sequence[int] | Request
"""A text, token ids, or a request with its own settings."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens and the text that prefill or one round added to one request."""

    index: int
    token_ids: tuple[int, ...]
    """New token ids, in order; empty only if the text had ended before."""
    pieces: tuple[tuple[str, bool], ...] = ()
    """The text in pieces, and whether each is of an accepted draft. It lags behind the tokens while a character is
    incomplete: the piece is that of its last token. Empty without a tokenizer."""
    result: GenerationResult | None = None
    """The complete result, in the last chunk of a request."""

    @property
    def text(self) -> str:
        """The text of the pieces."""
        return "".join(piece for piece, _ in self.pieces)


def require_depth(depth: int, deepest: int) -> None:
    """Raise an MtpError if ``depth`` is not between 0 and ``deepest``."""
    if not 0 <= depth <= deepest:
        raise MtpError(f"depth: {depth}; expected 0 to {deepest}. Use 3 unless you measured better.")
