"""Draft with an assistant model without a KV cache of its own: it attends to the keys that the trunk has cached.

Its input is the trunk's last hidden state and the embedding of the last committed token. Its output is a draft, and a
state that replaces the trunk's in the next step. Every token of a round is drafted at one position. Only the trunk's
last hidden state is stored between rounds, so no tokens are pending, and a prompt costs nothing.

Shapes: B rows of the batch, D the trunk's hidden size.
"""

from __future__ import annotations

from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_inference.drafters.drafter import BatchSize, Drafter, RoundPlan, StateDrafter, TrainedDrafting
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.errors import MtpError
from mtp_train.heads.assistant import AssistantHead, widened
from mtp_train.trunk.load import Trunk


class AssistantDrafting(TrainedDrafting):
    """Draft with an assistant model that attends to the trunk's keys, such as Gemma 4's.

    Args:
        head: The assistant, on the trunk's device and in its dtype; ``from_pretrained(..., head=ASSISTANT)`` loads it.
    """

    head: AssistantHead

    def check(self, trunk: Trunk, depth: int) -> None:
        super().check(trunk, depth)
        hidden = self.head.trunk_width
        vocab = len(self.head.own_lm_heads(1)[0])
        if (hidden, vocab) != tuple(reversed(trunk.lm_head_VD.shape)):
            raise MtpError(
                f"{self.head.family.title}: made for a hidden size of {hidden} and {vocab} tokens; found a trunk of "
                f"{trunk.lm_head_VD.shape[1]} and {trunk.lm_head_VD.shape[0]}. Use the trunk that it was made for."
            )

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return AssistantDrafter(trunk, cache, self.head, size.num_rows)


class AssistantDrafter(StateDrafter):
    """Draft from the trunk's last hidden state of every row."""

    def __init__(self, trunk: Trunk, cache: WindowCache, head: AssistantHead, num_rows: int) -> None:
        self.trunk = trunk
        # Not the cache as an attribute: the batch itself drops its rows.
        self.trunk_layers = cache.attention
        self.head = head
        self.state_B1D = head.own_lm_heads(1)[0].new_zeros(num_rows, 1, head.trunk_width)

    def read(self, hidden: Tensor) -> Tensor:
        return self.trunk.normed(hidden)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        # An inactive row has length 0 and attends to its first slot. Its drafts are discarded.
        seen_B1 = (choice.length_B - 1).clamp(min=0)[:, None]
        window = Window(slice(0, len(seen_B1)), seen_B1, plan.used)
        # The last layer of each type wins.
        last = {layer.kind: layer for layer in self.trunk_layers}
        keys, masks, used = {}, {}, slice(plan.used)
        for kind, layer in last.items():
            keys[kind] = layer.keys[:, :, used], layer.values[:, :, used]
            masks[kind] = window.mask(layer.size, widened(layer.sliding_window), always=True)
        hidden_B1D = self.state_B1D
        with attending_in_windows(self.head.config):
            for depth in range(1, plan.depth + 1):
                embed_B1D = self.trunk.embed(choice.last_B1)
                step = self.head.step(hidden_B1D, embed_B1D, keys=keys, masks=masks, positions_BT=seen_B1)
                choice.add(self.head.project(depth, step.logit_hidden_BTD))
                hidden_B1D = step.recycled_BTD
        return choice.result()
