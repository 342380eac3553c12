"""The protocol of a drafter, the sizes and plans that the decoder passes to it, and the tokens that it stores.

A drafter keeps its state in tensors that are written in place, and it does not synchronise with the device, unless its
docstring states otherwise. A round can therefore be captured and replayed.

A drafter receives every committed window, but it drafts only in some rounds. Until the next draft, tokens (for a head
also the hidden states before them) are pending.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, P places, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.recurrent import most_undecided
from mtp_inference.cache.rows import RowState, places_from
from mtp_inference.requests import MAX_DEPTH, require_depth
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.head import Head
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

    @property
    def deepest(self) -> int:
        """Largest number of drafts per round."""
        return MAX_DEPTH

    def check(self, trunk: Trunk, depth: int) -> None:
        """Raise an MtpError if ``depth`` tokens cannot be drafted for this trunk."""
        require_depth(depth, self.deepest)
        most = most_undecided(trunk.family)
        if most is not None and depth >= most:
            raise UnsupportedModelError(
                f"depth: {depth} with a trunk of {trunk.family.title}; expected at most {most - 1}, as its recurrent "
                f"layers can undo {most} tokens. Use depth {most - 1}."
            )

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        """Return a drafter for a batch, whose trunk writes ``cache``."""


class TrainedDrafting(Drafting):
    """Draft with a head.

    Args:
        head: The head, on the trunk's device; its dtype may differ.
        draft_vocab_R: Token ids that may be drafted, integers of shape (R,); None for the whole vocabulary.
    """

    head: Head

    def __init__(self, head: Any, draft_vocab_R: Tensor | None = None) -> None:
        self.head = head
        self.draft_vocab_R = draft_vocab_R

    @property
    def deepest(self) -> int:
        return self.head.family.kind.deepest


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


class StateDrafter(Drafter):
    """Base of drafters that read only the trunk's hidden state before the last committed token. No token is pending."""

    state_B1D: Tensor
    """The input of the drafter in every row."""

    @abstractmethod
    def read(self, hidden: Tensor) -> Tensor:
        """Return the drafter's input for hidden states of the trunk."""

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        self.state_B1D[rows] = self.read(hidden_RTD[:, -1:])

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """A row that keeps no token keeps its state."""
        last_B1D = self.read(state_at(hidden_BTD, (num_kept_B - 1).clamp(min=0)))
        self.state_B1D.copy_(torch.where(num_kept_B[:, None, None] > 0, last_B1D, self.state_B1D))


class Pending(RowState):
    """The pending tokens of every row, at consecutive positions, and the head's inputs (..., D) beside them."""

    def __init__(self, size: BatchSize, width: int, weight: Tensor) -> None:
        self.tokens_BP = torch.zeros(size.num_rows, size.num_pending, dtype=torch.long, device=weight.device)
        self.num_B = self.tokens_BP.new_zeros(size.num_rows)
        self.first_B = self.tokens_BP.new_zeros(size.num_rows)
        """Position of the head row of the first pending token."""
        self.hidden_BPD = weight.new_zeros(size.num_rows, size.num_pending, width)

    def begin(self, rows: slice, token_R: Tensor, first: int, hidden_RD: Tensor) -> None:
        self.tokens_BP[rows, 0] = token_R
        self.num_B[rows] = 1
        self.first_B[rows] = first
        self.hidden_BPD[rows, 0] = hidden_RD

    def add(self, tokens_BT: Tensor, num_kept_B: Tensor, hidden_BTD: Tensor) -> None:
        """Add the first ``num_kept_B`` tokens of a window; the rest is written too, and overwritten later."""
        places_BT = places_from(self.num_B, tokens_BT.shape[1])
        self.tokens_BP.scatter_(1, places_BT, tokens_BT)
        self.hidden_BPD.scatter_(1, places_BT[..., None].expand_as(hidden_BTD), hidden_BTD)
        self.num_B += num_kept_B

    def positions(self, num_places: int) -> Tensor:
        return places_from(self.first_B, num_places)

    def last(self, plan: RoundPlan) -> Tensor:
        # An inactive row may have no pending token, or a stale count.
        return (self.num_B - 1).clamp(0, plan.pending - 1)

    def clear(self) -> None:
        self.first_B += self.num_B
        self.num_B.zero_()


def state_at(states_BTD: Tensor, index_B: Tensor) -> Tensor:
    return states_BTD.take_along_dim(index_B[:, None, None], dim=1)
