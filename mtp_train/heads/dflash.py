"""Run a DFlash drafter: a block of tokens whose attention reads keys computed from the trunk's states.

The states of several trunk layers, projected to one vector for each committed token, give the keys and values of these
tokens in every layer. The block, the last committed token (the anchor) and mask tokens after it, runs through the
layers once. Its row j gives the logits of draft j, or of draft j + 1 where the anchor's row gives the first.

Shapes: B rows, T tokens of a block, S keys, N trunk layers that are read, D hidden, V vocabulary. Of whole
texts: T tokens of a text, P blocks in it, J tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicLayer, PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families import Convention, Family
from mtp_train.families.kinds.dflash import BlockMask
from mtp_train.families.kinds.kind import Block
from mtp_train.heads.attention import HEAD_ATTENTION
from mtp_train.heads.experts import GROUPED_EXPERTS
from mtp_train.heads.head import Head
from mtp_train.heads.step import KeysWritten
from mtp_train.upstream.transformers_private import CACHE, set_attention, set_experts

Correct = Callable[[int, Tensor, Tensor], Tensor]
"""The row of a block, its logits (B, 1, V) and the token before its draft, int (B, 1), to the logits of its draft."""


class DFlashModule(Block):
    """The projection of the trunk's states, the layers and the last norm."""

    def __init__(self, family: Family, config: PretrainedConfig, num_states: int) -> None:
        super().__init__()
        classes = family.classes
        width = config.hidden_size
        self.fc = nn.Linear(num_states * width, width, bias=False)
        self.hidden_norm = classes.make_norm(config)
        self.layers = nn.ModuleList(classes.make_layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = classes.make_norm(config)

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return the input of the keys and values: (B, T, N * D) to (B, T, D)."""
        return self.hidden_norm(self.fc(trunk_BTD))


class DFlashHead(Head):
    """A DFlash drafter as a head, with layers as its own config describes them."""

    teacher_forced = False
    chaining = "recursive"

    def __init__(
        self, family: Family, text_config: PretrainedConfig, *, num_modules: int, convention: Convention
    ) -> None:
        super().__init__()
        self.family = family
        self.convention = convention
        self.config: Any = family.classes.config(text_config, num_modules)
        set_attention(self.config, HEAD_ATTENTION)
        set_experts(self.config, GROUPED_EXPERTS)
        self.trunk_layers = family.wiring.trunk_layers(text_config)
        self.blocks = nn.ModuleList([DFlashModule(family, self.config, len(self.trunk_layers))])
        self.rotary = family.classes.cls(family.classes.prefix + "RotaryEmbedding")(config=self.config)
        self.block_size = int(self.config.block_size)
        self.mask_token = int(self.config.mask_token_id)
        self.first_row = int(not self.config.sample_from_anchor)
        """The row of a block that gives the first draft."""

    @property
    def module(self) -> Any:
        return self.blocks[0]

    @property
    def state_width(self) -> int:
        """The width D of the states that :meth:`read` returns."""
        return int(self.config.hidden_size)

    def module_index(self, depth: int) -> int:
        """Return 0: what the one module's layers store of a token is alike, and its first stands for all."""
        return 0

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return the input of :meth:`write_keys` from the concatenated states of the trunk's layers."""
        return self.module.read(trunk_BTD)

    def rotation(self, state: Tensor, positions_BT: Tensor) -> Any:
        """Return the layers' position embeddings, for states of a device and a dtype."""
        kind = self.family.classes.rotary_kind
        return self.rotary(state, positions_BT) if kind is None else {kind: self.rotary(state, positions_BT, kind)}

    def write_keys(self, context_BTD: Tensor, positions_BT: Tensor, cache: Cache) -> None:
        """Write the keys and values of committed tokens in every layer.

        Args:
            context_BTD: The result of :meth:`read`.
            cache: A cache in keys-only mode, which raises ``KeysWritten``.
        """
        rotation = self.rotation(context_BTD, positions_BT)
        for layer in self.module.layers:
            with suppress(KeysWritten):
                layer.self_attn(
                    context_BTD,
                    position_embeddings=rotation,
                    position_ids=positions_BT,
                    attention_mask=None,
                    **{CACHE: cache},
                )

    def mask(self, kind: str, positions_B1T1: Tensor, keys_B11S: Tensor) -> Tensor:
        """Return the attention mask of a type of layers: bool (B, 1, T, S), True where a token attends to a key.

        Args:
            positions_B1T1: int, the positions of a block's tokens.
            keys_B11S: int, the positions of the keys; negative for none.
        """
        rule: BlockMask = self.config.block_masks[kind]
        last_B111 = positions_B1T1[:, :, -1:]
        seen = (keys_B11S >= 0) & (keys_B11S <= (positions_B1T1 if rule.causal else last_B111))
        if rule.window is not None:
            distance = (positions_B1T1[:, :, :1] if rule.from_anchor else positions_B1T1) - keys_B11S
            seen = seen & ((distance if rule.from_anchor else distance.abs()) <= rule.window)
        return seen.expand(-1, -1, positions_B1T1.shape[2], -1)

    def denoise(self, embed_BTD: Tensor, positions_BT: Tensor, masks: Mapping[str, Tensor], cache: Cache) -> Tensor:
        """Return the states for the logits, (B, T, D), of the embeddings of whole blocks.

        Args:
            masks: The :meth:`mask` of every type of layers.
        """
        rotation = self.rotation(embed_BTD, positions_BT)
        hidden_BTD = embed_BTD
        for layer, kind in zip(self.module.layers, self.config.layer_types, strict=True):
            hidden_BTD = layer(
                hidden_BTD,
                position_embeddings=rotation,
                attention_mask=masks[kind],
                position_ids=positions_BT,
                **{CACHE: cache},
            )
        return self.module.norm(hidden_BTD)

    def blocks_at(
        self, trunk_BTD: Tensor, tokens_BT: Tensor, starts_P: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the states for the logits, (B * P, J, D), of the blocks that begin at some tokens of whole texts.

        Args:
            trunk_BTD: The states of the trunk's layers, concatenated.
            tokens_BT: int; only those at the starts are read.
            starts_P: int, the positions of the last committed tokens, of every text.
            embed: The trunk's embedding.
        """
        dtype = self.module.fc.weight.dtype
        positions_T = torch.arange(trunk_BTD.shape[1], device=trunk_BTD.device)
        cache = Cache(layers=[DynamicLayer() for _ in self.module.layers])
        self.write_keys(self.read(trunk_BTD.to(dtype)), positions_T.expand(len(trunk_BTD), -1), cache)
        cache.batch_repeat_interleave(len(starts_P))
        block_NJ = pad(tokens_BT[:, starts_P].reshape(-1, 1), (0, self.block_size - 1), value=self.mask_token)
        first_N1 = starts_P.repeat(len(trunk_BTD))[:, None]
        places_NJ = first_N1 + torch.arange(self.block_size, device=trunk_BTD.device)
        # All keys before a block, and those of the block itself.
        keys_NS = torch.cat([torch.where(positions_T < first_N1, positions_T, -1), places_NJ], dim=1)
        masks = {
            kind: self.mask(kind, places_NJ[:, None, :, None], keys_NS[:, None, None])
            for kind in {*self.config.layer_types}
        }
        return self.denoise(embed(block_NJ).to(dtype), places_NJ, masks, cache)

    def correcting(self, states_BTD: Tensor, anchor_B1: Tensor) -> Correct:
        """Return what a drafter computes of a block's logits once the tokens before a draft are chosen.

        Args:
            states_BTD: The states of the whole block.
            anchor_B1: int, the last committed tokens.
        """
        return lambda row, logits_B1V, token_B1: logits_B1V

    def project(self, depth: int, state: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        return self.module.project(state, shared)

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.family.title}: cannot be trained here; expected a head of another kind. Decode with it instead."
        )

    unroll = own_lm_heads = freeze_unused = _refuse
