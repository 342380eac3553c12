"""Run an assistant: a small decoder without keys of its own, which attends to those of its trunk.

It reads the trunk's embedding of a token, and a hidden state: the trunk's last one after the final norm at depth 1, its
own, projected back to the trunk's width, at later depths. All depths of a round have one position and attend to the
same keys. The input at start row t is as in ``alignment.py``, and depth k attends to the rows up to t.

Shapes: B rows, T tokens, S keys, D the trunk's hidden size, E the width of the trunk's states with keys and values, A
the assistant's hidden size, C centroids chosen of M tokens each (N = C * M), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig

from mtp_train.families import Convention, Family
from mtp_train.heads.alignment import UnrollMask, at_starts, input_tokens
from mtp_train.heads.attention import HEAD_ATTENTION, without_cudnn_attention
from mtp_train.heads.head import Head
from mtp_train.heads.step import StepOutput
from mtp_train.upstream.transformers_private import replacing, set_attention

# As in transformers, whose code the models' authors wrote. All drafts of a round have the same position: that of the
# last token that the trunk has read, and this offset. A sliding layer's window, counted with that token, has so many
# keys more than the trunk's. vLLM has 0 and 0, llama.cpp 1 and -1: there fewer drafts may be accepted.
POSITION_OFFSET, MORE_SLIDING_KEYS = 1, 1
SharedKeys = Mapping[str, tuple[Tensor, Tensor]]
"""Type of layers to their keys and values, each (B, key heads, S, width)."""


def widened(sliding_window: int | None) -> int | None:
    """Return the number of keys that an assistant attends to in layers of the trunk's window; None for all."""
    return None if sliding_window is None else sliding_window + MORE_SLIDING_KEYS


class AssistantHead(Head):
    """An assistant as a head: it drafts on detached tensors of the trunk, with an output matrix of its own.

    Embedding and lm_head are one tensor, and frozen like the trunk's. So are the centroids: ``topk`` has no gradient,
    and they stand for rows of that tensor.

    Args:
        model: transformers' model of the assistant, whose lm_head it takes off.
        family: The record of the trunk's family with an assistant.
    """

    reads_keys = True

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        # Tied to the embedding, it would be a second parameter in states and files.
        del model.lm_head
        self.blocks = nn.ModuleList([model.requires_grad_(False)])
        self.family = family
        self.convention = family.wiring.default
        for part in (model.pre_projection, model.post_projection, model.model.layers, model.model.norm):
            part.requires_grad_(True)
        set_attention(self.config, HEAD_ATTENTION)

    @property
    def model(self) -> Any:
        return self.blocks[0]

    @property
    def output_VA(self) -> Tensor:
        """The output matrix, which is the assistant's own embedding."""
        return self.model.model.embed_tokens.weight

    @property
    def config(self) -> Any:
        """The config of the assistant's decoder."""
        return self.model.model.config

    @property
    def trunk_width(self) -> int:
        """The hidden size of the trunk, D."""
        return int(self.model.post_projection.out_features)

    @without_cudnn_attention()
    def step(
        self,
        hidden_BTD: Tensor,
        embed_BTD: Tensor,
        *,
        keys: SharedKeys,
        masks: Mapping[str, Tensor | UnrollMask | None],
        positions_BT: Tensor,
    ) -> StepOutput:
        """Run one depth.

        Args:
            hidden_BTD: The trunk's last hidden state after the final norm (depth 1), or the recycled state.
            embed_BTD: The trunk's embedding of the token that each row reads.
            keys: The trunk's keys and values.
            masks: Type of layers to a bool mask (B, 1, T, S), True where a query attends to a key.
            positions_BT: int, the position of the trunk's last token before each row's draft, at every depth.

        Returns:
            The state for the logits (B, T, A), and the state to recycle (B, T, D).
        """
        output = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([embed_BTD, hidden_BTD], dim=-1)),
            position_ids=positions_BT + POSITION_OFFSET,
            attention_mask=masks,
            shared_kv_states=dict(keys),
            use_cache=False,
            # Else transformers 5.24 keeps the last of several tokens, and fails as there are no per-layer embeddings.
            output_hidden_states=positions_BT.shape[1] > 1,
        )
        state_BTA = output.last_hidden_state
        return StepOutput(state_BTA, self.model.post_projection(state_BTA))

    def unroll(
        self,
        hidden_BTE: Tensor,
        tokens_BT: Tensor,
        embed: Callable[[Tensor], Tensor],
        *,
        num_depths: int,
        positions_BT: Tensor,
        document_BT: Tensor,
        apart: bool = False,
        recompute: bool = False,
        starts_BP: Tensor | None = None,
    ) -> list[Tensor]:
        """See :meth:`mtp_train.heads.head.Head.unroll`; ``apart`` has no effect, as no depth attends to another."""
        hidden_BTD, keys = self._split(hidden_BTE.detach())
        windows = {"full_attention": None, "sliding_attention": self.config.sliding_window}
        masks = {kind: UnrollMask(document_BT, 1, widened(window), starts_BP) for kind, window in windows.items()}
        run = partial(self.step, keys=keys, masks=masks, positions_BT=at_starts(positions_BT, starts_BP))
        hidden_BTD = at_starts(hidden_BTD, starts_BP)
        states = []
        for depth in range(1, num_depths + 1):
            inputs = hidden_BTD, embed(at_starts(input_tokens(tokens_BT, depth), starts_BP)).detach()
            state_BTA, hidden_BTD = checkpoint(run, *inputs, use_reentrant=False) if recompute else run(*inputs)
            states.append(state_BTA)
        return states

    def _split(self, hidden_BTE: Tensor) -> tuple[Tensor, SharedKeys]:
        """Return the hidden state and the keys that a trunk shows together, see ``Ends.show_to``."""
        shapes = self.family.trunk.key_shapes(self.config)
        sizes = [heads * width for heads, width in shapes.values() for _ in ("keys", "values")]
        hidden_BTD, *flat = hidden_BTE.split([self.trunk_width, *sizes], dim=-1)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return hidden_BTD, {
            kind: (
                keys_BTW.unflatten(-1, shape).transpose(1, 2),
                values_BTW.unflatten(-1, shape).transpose(1, 2),
            )
            for (kind, shape), (keys_BTW, values_BTW) in zip(shapes.items(), pairs, strict=True)
        }

    def own_lm_heads(self, num_depths: int) -> list[Tensor]:
        return [self.output_VA] * num_depths

    def project(self, depth: int, state: Tensor, shared: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return logits (..., V). With centroids, tokens outside the best ones get minus infinity."""
        weight_VA = self.output_VA
        centroids = self.model.masked_embedding
        if centroids is None:
            return state @ weight_VA.T
        chosen = centroids.centroids(state).topk(centroids.centroid_intermediate_top_k).indices
        tokens = centroids.token_ordering.long().view(centroids.num_centroids, -1)[chosen].flatten(-2)
        # Of many rows, the chosen rows of the matrix are together larger than the matrix.
        if tokens.numel() < len(weight_VA):
            logits = (weight_VA[tokens] @ state[..., None]).squeeze(-1)
        else:
            logits = (state @ weight_VA.T).gather(-1, tokens)
        # transformers gives the other tokens slightly less than the smallest of these logits; we never draft them.
        nothing = logits.new_full((*logits.shape[:-1], len(weight_VA)), -torch.inf)
        return nothing.scatter(-1, tokens, logits)

    def freeze_unused(self, num_depths: int) -> None:
        """Freeze the projection of the state to recycle, if there is one depth."""
        if num_depths == 1:
            self.model.post_projection.requires_grad_(False)


def assistant_head(
    family: Family, text_config: PretrainedConfig, *, num_modules: int, convention: Convention
) -> AssistantHead:
    """Build an assistant as its own config has it, see :class:`mtp_train.families.kinds.assistant.AssistantParts`."""
    config = family.classes.config(text_config, num_modules)
    with building_assistant(config.get_text_config()):
        return AssistantHead(AutoModelForCausalLM.from_config(config), family)


def building_assistant(text_config: PretrainedConfig) -> AbstractContextManager[None]:
    """Allow building a model whose layers all reuse the trunk's keys; transformers 5.23.0 refuses such assistants."""
    if not hasattr(type(text_config), "kv_sharing_modes"):
        return nullcontext()
    every_layer = property(lambda config: ["reuse"] * config.num_hidden_layers)
    return replacing(type(text_config), kv_sharing_modes=every_layer)
