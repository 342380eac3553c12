"""What a drafter is: the protocol that the decoder drives, and what passes between them.

Everything of a drafter that changes lives in tensors that are written in place, and nothing of it waits for the
device, unless its docstring says so: a round can be captured and replayed.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, D hidden, K depths, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from mtp_inference.cache import WindowCache
from mtp_inference.chooser import Chooser, Drafts
from mtp_train.heads.trunk import Trunk


class Size(NamedTuple):
    """What a drafter makes room for."""

    num_rows: int
    """Rows of the batch."""
    capacity: int
    """Positions that a row may reach."""
    num_pending: int
    """Committed tokens of a row that may wait until the drafter is asked again."""


class Place(NamedTuple):
    """Where a round stands."""

    used: int
    """Positions in use after the round, an upper bound known on the host."""
    pending: int
    """Most pending tokens of any row, an upper bound known on the host."""
    last_B: Tensor
    """int64, the last committed tokens."""
    length_B: Tensor
    """int64, their positions."""
    trunk_cache: WindowCache | None = None
    """What the trunk keeps of the positions before; None where nobody reads it."""


class DrafterMaker(Protocol):
    """Makes the drafter of a batch."""

    def check(self, trunk: Trunk, depth: int) -> None:
        """Raise an MtpError where it cannot draft that deep for this trunk."""

    def make(self, trunk: Trunk, size: Size, depth: int) -> Drafter:
        """Return a drafter for a batch; ``depth`` is the deepest draft that will be asked for."""


class Drafter(Protocol):
    """What the decoder asks of a drafter."""

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """Take in prompts of one length, the trunk's hidden states of them, and the tokens that followed."""

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """Take in a committed window: the trunk's hidden states, and the token that followed each of its tokens.

        The first ``num_kept_B`` of each row count. They are pending until the next ``draft`` or ``settle``.
        """

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """Return ``depth`` drafted tokens for every row, and take the pending tokens in."""

    def settle(self, place: Place) -> None:
        """Take the pending tokens in without drafting."""
