"""What one asks of the decoder, and what one gets back while it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtp_inference.sampling import Sampling
from mtp_inference.stats import GenerationResult
from mtp_train.errors import MtpError

MAX_DEPTH = 7
MtpMode = Literal["on", "off", "auto"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt.

    Raises:
        MtpError: A value is out of range.
    """

    prompt_ids: Sequence[int]
    """At least one token."""
    max_new_tokens: int
    """At least 1."""
    sampling: Sampling = field(default_factory=Sampling)
    mtp: MtpMode = "on"
    """``on`` drafts ``depth`` tokens every round, ``off`` none, ``auto`` as many as pay, up to ``depth``."""
    depth: int | None = None
    """Drafts per round, 0 to 7; None is the decoder's."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the text, besides the decoder's; the one that ended it is returned."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; it is cut before them. They need a tokenizer."""

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise MtpError("prompt: no token; expected at least one. Start it with the tokenizer's BOS token.")
        if self.max_new_tokens < 1:
            raise MtpError(f"max_new_tokens: {self.max_new_tokens}; expected 1 or more. Ask for at least one token.")
        if self.mtp not in ("on", "off", "auto"):
            raise MtpError(f"mtp: '{self.mtp}'; expected on, off or auto. Use on for a fixed depth.")
        if self.depth is not None:
            require_depth(self.depth)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one round, or prefill, added to one text."""

    index: int
    """Which of the requests."""
    token_ids: tuple[int, ...]
    """New tokens, in order; empty only where the text had ended."""
    text: str
    """Text that is certain now; lags behind the tokens where a character or a stop string may be incomplete. Empty
    without a tokenizer."""
    result: GenerationResult | None = None
    """The whole, with the last chunk of a request."""


def require_depth(depth: int) -> None:
    """Raise a MtpError for a depth that cannot be drafted."""
    if not 0 <= depth <= MAX_DEPTH:
        raise MtpError(f"depth: {depth}; expected 0 to {MAX_DEPTH}. Use 3 unless you measured better.")
