"""The protocol of a drafter, and the sizes and plans that the decoder passes to it.

A drafter keeps its state in tensors that are written in place, and it does not synchronise with the device, unless its
docstring states otherwise. A round can therefore be captured and replayed.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.rows import RowState
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.trunk.load import Trunk

PENDING_PLACES = 32
"""Largest number of committed tokens of a row that may be pending for the drafter before a round."""


class BatchSize(NamedTuple):
    """Sizes that a batch is built for."""

    num_rows: int
    capacity: int
    depth: int
    """Largest number of drafts per round."""
    max_window: int
    """Longest window of a forward, prefill included."""
    num_stops: int = 0

    @property
    def num_pending(self) -> int:
        """Largest number of committed tokens of a row that may be pending after a round."""
        return PENDING_PLACES + self.depth + 1

    def covers(self, other: BatchSize) -> bool:
        """Return whether a batch of this size serves another size as fast as one of its own.

        Further rows would cost time in every round, and a drafter in every prefill, also of texts without drafts.
        """
        same = self.num_rows == other.num_rows and (self.depth > 0) == (other.depth > 0)
        return same and all(ours >= theirs for ours, theirs in zip(self, other, strict=True))


@dataclass(frozen=True)
class RoundPlan:
    """Settings of a round, known on the host. A captured round is replayed only for an equal plan."""

    depth: int
    """Drafts per row; 0 is plain decoding."""
    used: int
    """Positions in use after the round, an upper bound."""
    pending: int
    """Committed tokens of a row that the drafter has not processed yet, an upper bound over rows."""
    start: int | None
    """The first position of the window, if it is the same for all rows and known on the host; else None."""


class Drafting(Protocol):
    """A way of drafting, such as a head; makes the drafter of each batch."""

    def check(self, trunk: Trunk, depth: int) -> None:
        """Raise an MtpError if ``depth`` tokens cannot be drafted for this trunk; by default any number can."""
        return

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        """Return a drafter for a batch, whose trunk writes ``cache``."""


class Drafter(RowState, ABC):
    """Drafts tokens for the rows of a batch, and follows the tokens that are committed."""

    @abstractmethod
    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """Start rows: prompts of one length, the trunk's hidden states for them, and the first committed tokens."""

    @abstractmethod
    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """Add a committed window: the trunk's hidden states, and the token after each of its tokens.

        Only the first ``num_kept_B`` of each row count. They are pending until the next ``draft``.
        """

    @abstractmethod
    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        """Process the pending tokens, and return ``plan.depth`` drafted tokens for every row; may be 0."""
