"""Drafting with a head whose depths do not see one another (Medusa, arXiv:2401.10774): one state, all depths.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtp_inference.chooser import Chooser, Drafts
from mtp_inference.draft import Place, Size
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import mtp_step
from mtp_train.heads.trunk import Trunk


class ParallelDrafter:
    """Draft depth k with module k from the trunk's state before the last committed token.

    Args:
        trunk: The trunk.
        head: The head; its dtype may differ from the trunk's.
        logits: From the head's states (B, 1, D) to logits (B, 1, V).
        size: Rows, positions and places.
    """

    def __init__(self, trunk: Trunk, head: MtpHead, logits: Callable[[Tensor], Tensor], size: Size) -> None:
        self.trunk = trunk
        self.head = head
        self.logits = logits
        self.state_B1D = next(head.parameters()).new_zeros(size.num_rows, 1, head.state_width)
        self.position_B1 = torch.zeros(size.num_rows, 1, dtype=torch.long, device=self.state_B1D.device)

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`mtp_inference.draft.Drafter`."""
        self.state_B1D[rows] = self._head_input(hidden_RTD[:, -1:])

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`mtp_inference.draft.Drafter`."""
        index_B11 = (num_kept_B - 1).clamp(min=0)[:, None, None]
        last_B1D = hidden_BTD.gather(1, index_B11.expand(-1, -1, hidden_BTD.shape[-1]))
        # A row out of use keeps nothing.
        self.state_B1D.copy_(torch.where(num_kept_B[:, None, None] > 0, self._head_input(last_B1D), self.state_B1D))

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`mtp_inference.draft.Drafter`."""
        choice = chooser.begin_draft(place.last_B, place.length_B)
        for depth_now in range(1, depth + 1):
            step = mtp_step(
                self.head,
                self.state_B1D,
                # It reads no token.
                self.state_B1D,
                depth=depth_now,
                positions_BT=self.position_B1,
                mask_BTS=None,
                cache=None,
            )
            state_B1D = step.logit_hidden_BTD.to(self.trunk.lm_head_VD.dtype)
            choice.add(self.head.module_for(depth_now).project(state_B1D, self.logits))
        return choice.result()

    def settle(self, place: Place) -> None:
        """See :class:`mtp_inference.draft.Drafter`: nothing ever waits."""

    def _head_input(self, hidden: Tensor) -> Tensor:
        return self.trunk.head_input(hidden, self.head.convention).to(self.state_B1D.dtype)
