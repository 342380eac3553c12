"""The protocol of a drafter, and the types that the decoder passes to it.

A drafter keeps its state in tensors that are written in place, and it does not synchronise with the device, unless its
docstring states otherwise. A round can therefore be captured and replayed.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, D hidden, K depths, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.sampling.chooser import Chooser, Drafts
from mtp_train.trunk.load import Trunk


class Size(NamedTuple):
    """Sizes of a drafter's buffers."""

    num_rows: int
    """Rows of the batch."""
    capacity: int
    """Number of positions of a row."""
    num_pending: int
    """Largest number of committed tokens of a row that may be pending until the next draft."""


class Place(NamedTuple):
    """Positions of a round."""

    used: int
    """Positions in use after the round, an upper bound known on the host."""
    pending: int
    """Pending tokens of a row, an upper bound known on the host."""
    last_B: Tensor
    """int64, the last committed tokens."""
    length_B: Tensor
    """int64, the positions of the last committed tokens."""
    trunk_cache: WindowCache | None = None
    """The trunk's cache of earlier positions; None if the drafter does not read it."""


class DrafterMaker(Protocol):
    """Builds the drafter of a batch."""

    def check(self, trunk: Trunk, depth: int) -> None:
        """Raise an MtpError if ``depth`` tokens cannot be drafted for this trunk."""

    def make(self, trunk: Trunk, size: Size, depth: int) -> Drafter:
        """Return a drafter for a batch; ``depth`` is the largest number of drafts per round."""


class Drafter(Protocol):
    """Drafts tokens for the rows of a batch, and follows the tokens that are committed."""

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """Start rows: prompts of one length, the trunk's hidden states for them, and the first committed tokens."""

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """Add a committed window: the trunk's hidden states, and the token after each of its tokens.

        Only the first ``num_kept_B`` of each row count. They are pending until the next ``draft`` or ``settle``.
        """

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """Process the pending tokens, and return ``depth`` drafted tokens for every row."""

    def settle(self, place: Place) -> None:
        """Process the pending tokens without drafting."""

    def keep_rows(self, rows_R: Tensor) -> None:
        """Keep these rows, int64 indices in the new order, and drop all others."""
