"""Draft a whole block of tokens in one pass with a DFlash drafter.

Its cache has the keys and values of the committed tokens, computed from the trunk's states. A draft first writes those
of the pending tokens. Then the block runs: the last committed token and mask tokens, as many as in training whatever
the depth. The next round overwrites the block's keys.

Shapes: B rows of the batch, T tokens, S slots, D hidden, K drafts.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.rows import places_from
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_inference.drafters.drafter import BatchSize, Drafter, RoundPlan, TrainedDrafting
from mtp_inference.drafters.head_drafter import TextDrafter
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.heads.dflash import DFlashHead
from mtp_train.heads.step import KeysWritten
from mtp_train.trunk.load import Trunk


class BlockDrafting(TrainedDrafting):
    """Draft with a DFlash drafter, at most one token less than its block.

    Args:
        head: The drafter, on the trunk's device; its dtype may differ. ``from_pretrained(..., head=DRAFTER)`` loads it.
    """

    head: DFlashHead

    def __init__(self, head: DFlashHead) -> None:
        self.head = head

    @property
    def deepest(self) -> int:
        return min(super().deepest, self.head.block_size - 1)

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        trunk.show_layers(self.head.trunk_layers)
        return BlockDrafter(trunk, self.head, trunk.project, size._replace(depth=self.head.block_size))


class BlockDrafter(TextDrafter):
    """Draft every row's block; ``size.depth`` is the number of tokens of a block."""

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        self._write_pending(1, plan)
        if plan.depth == 0:
            return choice.result()
        head = self.head
        tokens_BT = pad(choice.last_B1, (0, head.block_size - 1), value=head.mask_token)
        window = self._window(places_from(choice.length_B, head.block_size), plan)
        self.cache.begin(window)
        # Tokens of the block attend to those after them too.
        slots_S = torch.arange(window.used, device=tokens_BT.device)
        mask_BS = slots_S <= window.positions_BT[:, -1:]
        with attending_in_windows(head.config):
            state_BTD = head.denoise(
                self.trunk.embed(tokens_BT).to(self.weight.dtype),
                window.positions_BT,
                mask_BS[:, None, None].expand(-1, -1, head.block_size, -1),
                self.cache,
            )
        for logits_B1V in self._logits(1, state_BTD[:, 1 : plan.depth + 1]).split(1, dim=1):
            choice.add(logits_B1V)
        return choice.result()

    def _run(self, depth: int, hidden_BTD: Tensor, tokens_BT: Tensor, window: Window) -> NoReturn:
        """Write the keys and values of committed tokens, which is all that later tokens read."""
        self.cache.begin(window)
        self.head.write_keys(hidden_BTD, window.positions_BT, self.cache)
        raise KeysWritten
