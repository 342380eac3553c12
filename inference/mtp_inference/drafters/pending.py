"""Committed tokens that a drafter has not processed yet.

A drafter receives every committed window, but it drafts only in some rounds. Until the next draft, tokens (for a head
also the hidden states before them) are stored here. The number of pending tokens differs between batch rows.

Shapes: B rows of the batch, T tokens of a window, P places, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.rows import RowState
from mtp_inference.drafters.drafter import BatchSize, RoundPlan


class Pending(RowState):
    """The pending tokens of every row, at consecutive positions.

    Args:
        width: D, the width of the hidden states; 0 to store tokens only.
    """

    def __init__(self, size: BatchSize, device: torch.device, width: int = 0, dtype: torch.dtype = torch.float32):
        self.tokens_BP = torch.zeros(size.num_rows, size.num_pending, dtype=torch.long, device=device)
        self.num_B = self.tokens_BP.new_zeros(size.num_rows)
        self.first_B = self.tokens_BP.new_zeros(size.num_rows)
        """Position of the head row of the first pending token."""
        self.hidden_BPD = torch.zeros(size.num_rows, size.num_pending, width, dtype=dtype, device=device)

    def begin(self, rows: slice, token_R: Tensor, first: int, hidden_RD: Tensor | None = None) -> None:
        self.tokens_BP[rows, 0] = token_R
        self.num_B[rows] = 1
        self.first_B[rows] = first
        if hidden_RD is not None:
            self.hidden_BPD[rows, 0] = hidden_RD.to(self.hidden_BPD.dtype)

    def add(self, tokens_BT: Tensor, num_kept_B: Tensor, hidden_BTD: Tensor | None = None) -> None:
        """Add the first ``num_kept_B`` tokens of a window; the rest is written too, and overwritten later."""
        places_BT = self.num_B[:, None] + torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        self.tokens_BP.scatter_(1, places_BT, tokens_BT)
        if hidden_BTD is not None:
            places_BTD = places_BT[..., None].expand_as(hidden_BTD)
            self.hidden_BPD.scatter_(1, places_BTD, hidden_BTD.to(self.hidden_BPD.dtype))
        self.num_B += num_kept_B

    def positions(self, num_places: int) -> Tensor:
        return self.first_B[:, None] + torch.arange(num_places, device=self.first_B.device)

    def last(self, plan: RoundPlan) -> Tensor:
        # An inactive row may have no pending token, or a stale count.
        return (self.num_B - 1).clamp(0, plan.pending - 1)

    def clear(self) -> None:
        self.first_B += self.num_B
        self.num_B.zero_()


def state_at(states_BTD: Tensor, index_B: Tensor) -> Tensor:
    return states_BTD.take_along_dim(index_B[:, None, None], dim=1)
