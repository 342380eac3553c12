"""Draft with an assistant model without a KV cache of its own: it attends to the keys that the trunk has cached.

Its input is the trunk's last hidden state and the embedding of the last committed token. Its output is a draft, and a
state that replaces the trunk's in the next step. Every token of a round is drafted at one position. Only the trunk's
last hidden state is stored between rounds, so no tokens are pending, and a prompt costs nothing.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, S slots, C centroids chosen of M tokens
each (N = C * M), D the trunk's hidden size, E = 2 D, A the drafter's hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan, StateDrafter
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.errors import MtpError
from mtp_train.families import Assistant
from mtp_train.trunk.load import Trunk

# As in transformers, whose code the models' authors wrote. All drafts of a round have the same position: that of the
# last token that the trunk has read, and this offset. A sliding layer's window, counted with that token, has so many
# keys more than the trunk's. vLLM has 0 and 0, llama.cpp 1 and -1: there fewer drafts may be accepted.
POSITION_OFFSET, MORE_SLIDING_KEYS = 1, 1


class AssistantDrafting(Drafting):
    """Draft with an assistant model that attends to the trunk's keys, such as Gemma 4's.

    Args:
        model: transformers' model of the assistant, on the trunk's device and in its dtype. ``load_assistant`` in
            ``mtp_train.heads.draft_model`` loads it; ``from_pretrained(..., head=ASSISTANT)`` does both.
        assistant: The record of the assistant.
    """

    def __init__(self, model: Any, assistant: Assistant) -> None:
        self.model = model
        self.assistant = assistant

    def check(self, trunk: Trunk, depth: int) -> None:
        super().check(trunk, depth)
        hidden, vocab = self.model.post_projection.out_features, self.model.lm_head.out_features
        if (hidden, vocab) != tuple(reversed(trunk.lm_head_VD.shape)):
            raise MtpError(
                f"{self.assistant.title}: made for a hidden size of {hidden} and {vocab} tokens; found a trunk of "
                f"{trunk.lm_head_VD.shape[1]} and {trunk.lm_head_VD.shape[0]}. Use the trunk that it was made for."
            )

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return AssistantDrafter(trunk, cache, self.model, size.num_rows)


class AssistantDrafter(StateDrafter):
    """Draft from the trunk's last hidden state of every row."""

    def __init__(self, trunk: Trunk, cache: WindowCache, model: Any, num_rows: int) -> None:
        self.trunk = trunk
        # Not the cache as an attribute: the batch itself drops its rows.
        self.trunk_layers = cache.layers
        self.model = model
        self.state_B1D = model.pre_projection.weight.new_zeros(num_rows, 1, model.post_projection.out_features)

    def read(self, hidden: Tensor) -> Tensor:
        return self.trunk.normed(hidden)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        # An inactive row has length 0 and attends to its first slot. Its drafts are discarded.
        seen_B1 = (choice.length_B - 1).clamp(min=0)[:, None]
        window = Window(slice(0, len(seen_B1)), seen_B1, plan.used)
        # The last layer of each type wins.
        last = {layer.kind: layer for layer in self.trunk_layers if isinstance(layer, AttentionStore)}
        keys, masks, used = {}, {}, slice(plan.used)
        for kind, layer in last.items():
            wide = layer.sliding_window and layer.sliding_window + MORE_SLIDING_KEYS
            keys[kind] = layer.keys[:, :, used], layer.values[:, :, used]
            masks[kind] = window.mask(layer.size, wide, always=True)
        hidden_B1D, decoder = self.state_B1D, self.model.model
        with attending_in_windows(decoder.config):
            for _ in range(plan.depth):
                inputs_B1E = torch.cat([self.trunk.embed(choice.last_B1), hidden_B1D], dim=-1)
                output = decoder(
                    inputs_embeds=self.model.pre_projection(inputs_B1E),
                    position_ids=seen_B1 + POSITION_OFFSET,
                    attention_mask=masks,
                    shared_kv_states=dict(keys),
                    use_cache=False,
                )
                state_B1A = output.last_hidden_state
                choice.add(self._logits(state_B1A))
                hidden_B1D = self.model.post_projection(state_B1A)
        return choice.result()

    def _logits(self, state_B1A: Tensor) -> Tensor:
        """Return logits (B, 1, V). With centroids, tokens outside the best ones get minus infinity."""
        weight_VA, centroids = self.model.lm_head.weight, self.model.masked_embedding
        if centroids is None:
            return self.model.lm_head(state_B1A)
        chosen_B1C = centroids.centroids(state_B1A).topk(centroids.centroid_intermediate_top_k).indices
        tokens_B1N = centroids.token_ordering.long().view(centroids.num_centroids, -1)[chosen_B1C].flatten(-2)
        logits_B1N = (weight_VA[tokens_B1N] @ state_B1A[..., None]).squeeze(-1)
        # transformers gives the other tokens slightly less than the smallest of these logits; we never draft them.
        nothing_B1V = logits_B1N.new_full((*logits_B1N.shape[:2], len(weight_VA)), -torch.inf)
        return nothing_B1V.scatter(-1, tokens_B1N, logits_B1N)
