"""Draft a whole block of tokens in one pass with a block drafter: DFlash, DFlash 2 or DSpark.

Its cache has the keys and values of the committed tokens, computed from the trunk's states. A draft first writes those
of the pending tokens. Then the block runs: the last committed token and mask tokens, as many as in training whatever
the depth. The next round overwrites the block's keys. Drafts are chosen one after the other, as some drafters correct
the logits of a draft by the token before it.

Shapes: B rows of the batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NoReturn

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
    """Draft with a block drafter, at most as many tokens as rows of its block give drafts.

    Args:
        head: The drafter, on the trunk's device; its dtype may differ. ``from_pretrained(..., head=DRAFTER)`` loads it.
    """

    head: DFlashHead

    @property
    def deepest(self) -> int:
        return min(super().deepest, self.head.block_size - self.head.first_row)

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
        stores = {layer.kind: layer for layer in self.cache.attention}
        masks = {
            kind: head.mask(kind, *window.places(store.size, store.sliding_window, each_row=True))
            for kind, store in stores.items()
        }
        with attending_in_windows(head.config):
            state_BTD = head.denoise(
                self.trunk.embed(tokens_BT).to(self.weight.dtype),
                window.positions_BT,
                masks,
                self.cache,
            )
        first = head.first_row
        correct = head.correcting(state_BTD, choice.last_B1)
        logits_BTV = self._logits(1, state_BTD[:, first : first + plan.depth])
        for row, logits_B1V in enumerate(logits_BTV.split(1, dim=1), start=first):
            choice.add(correct(row, logits_B1V, choice.last_B1))
        return choice.result()

    def _run(self, depth: int, hidden_BTD: Tensor, tokens_BT: Tensor, window: Window) -> NoReturn:
        """Write the keys and values of committed tokens, which is all that later tokens read."""
        self.cache.begin(window)
        self.head.write_keys(hidden_BTD, window.positions_BT, self.cache)
        raise KeysWritten
