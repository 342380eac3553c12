"""Attention to selected blocks of keys, with blocks counted by position and not by slot in the cache.

transformers' indexer assumes that a key's slot in the cache is its position. In the training unroll the two differ:
the keys of later depths follow all keys of depth 1, and packed documents follow one another. This indexer reads every
key's position, so that a row selects the same blocks in training as in decoding.

Shapes: B rows, T queries, S keys, H heads of the indexer, N blocks, X width of the indexer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicLayer, PretrainedConfig

MOST_MODULES = 8
BLOCK_CACHE_LAYER = "MiniMaxM3VLSparseCacheLayer"
"""transformers' cache class for such layers, by name: importing it would import the model."""


class UnrolledBlocks(DynamicLayer):
    """Cache of keys, indexer keys and positions in an unroll, with the depths one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._positions: tuple[Tensor, ...] = ()
        self._index_keys: tuple[Tensor, ...] = ()

    def update_positions(self, positions_BT: Tensor) -> Tensor:
        """Append the positions of new keys; return all positions, (B, S)."""
        # A new tuple, because a shallow copy of this layer may be run again from its earlier state.
        self._positions = (*self._positions, positions_BT)
        return torch.cat(self._positions, dim=1)

    def update_index(self, keys_B1TX: Tensor) -> Tensor:
        """Append new indexer keys; return all indexer keys, (B, 1, S, X)."""
        self._index_keys = (*self._index_keys, keys_B1TX)
        return torch.cat(self._index_keys, dim=2)


class KeyScores(NamedTuple):
    """Scores of all keys for each query, before the attention mask is applied."""

    scores_BHTS: Tensor
    key_blocks_BS: Tensor
    query_blocks_BT: Tensor
    num_blocks: int


class BlockIndexer(nn.Module):
    """An indexer that scores keys with a few small heads and selects the best blocks for each query and head.

    Args:
        stock: transformers' indexer of the layer; its weights are reused under the same names.
        rotate: Function that applies the rotary embedding to queries and keys.
    """

    def __init__(self, stock: Any, config: PretrainedConfig, rotate: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.q_norm, self.k_norm = stock.q_proj, stock.k_proj, stock.q_norm, stock.k_norm
        self.rotate = rotate
        self.layer_idx = stock.layer_idx
        self.config = config

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Cache | None,
        position_ids: Tensor,
    ) -> KeyScores | None:
        """Return the scores of all keys, or None if there are no more blocks than a query may attend to."""
        heads = (*hidden_states.shape[:-1], -1, self.config.index_head_dim)
        query_BHTX = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        key_B1SX = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        cos, sin = (part[..., : self.config.index_head_dim] for part in position_embeddings)
        query_BHTX, key_B1SX = self.rotate(query_BHTX, key_B1SX, cos, sin)
        positions_BS = position_ids
        if cache is not None:
            layer: Any = cache.layers[self.layer_idx]
            positions_BS = layer.update_positions(position_ids)
            key_B1SX = layer.update_index(key_B1SX)
        # The position of a later module's row exceeds its slot by up to the number of modules.
        num_blocks = (key_B1SX.shape[2] + MOST_MODULES) // self.config.index_block_size + 1
        if num_blocks <= self.config.index_topk_blocks:
            return None
        scores_BHTS = query_BHTX.float() @ key_B1SX.float().transpose(-1, -2)
        return KeyScores(scores_BHTS, self._blocks(positions_BS), self._blocks(position_ids), num_blocks)

    def _blocks(self, positions: Tensor) -> Tensor:
        return positions.clamp(min=0) // self.config.index_block_size

    @torch.no_grad()
    def build_block_mask(
        self, block_indices: KeyScores, attention_mask: Tensor, *_unused: object, **_also_unused: object
    ) -> Tensor:
        """Select the blocks. Name and arguments are the same as in transformers' indexer.

        Args:
            block_indices: The result of :meth:`forward`.
            attention_mask: bool, broadcast to (B, 1, T, S), True where a query may attend to a key.

        Returns:
            bool, (B, H, T, S): True where the queries of a group of attention heads attend to a key.
        """
        scores_BHTS, key_blocks_BS, query_blocks_BT, num_blocks = block_indices
        seen_BHTS = scores_BHTS.masked_fill(~attention_mask, -torch.inf)
        key_blocks_BHTS = key_blocks_BS[:, None, None].expand_as(seen_BHTS)
        best_BHTN = seen_BHTS.new_full((*seen_BHTS.shape[:3], num_blocks), -torch.inf)
        best_BHTN = best_BHTN.scatter_reduce(-1, key_blocks_BHTS, seen_BHTS, "amax")
        for distance in range(self.config.index_local_blocks):
            near_BHT1 = (query_blocks_BT - distance).clamp(min=0)[:, None, :, None].expand_as(best_BHTN[..., :1])
            best_BHTN = best_BHTN.scatter(-1, near_BHT1, torch.inf)
        # Blocks whose keys are all masked may be among the best; the attention mask removes them again.
        chosen_BHTK = best_BHTN.topk(min(self.config.index_topk_blocks, num_blocks), dim=-1).indices
        chosen_BHTN = torch.zeros_like(best_BHTN, dtype=torch.bool).scatter(-1, chosen_BHTK, True)
        return chosen_BHTN.gather(-1, key_blocks_BHTS) & attention_mask
