"""Attention to selected pools of keys, for batches whose rows are at different positions.

An indexer reduces every N consecutive keys of a text (a "pool") to one key and scores the pools. It selects the keys of
the best pools, and the keys of the last, incomplete pool. transformers assumes that a key's slot in the cache is its
position. The two differ in the training unroll, where the keys of later depths follow all keys of depth 1 and packed
documents follow one another, and in decoding, where rows are at different positions. Here every token computes the pool
that would end with it from its own inputs and those before it; the pool counts if a pool ends at the token's position.

Shapes: B rows, T queries, S keys, N keys of a pool, P pools, X width of a pool's key, K selected keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from mtp_train.families.mechanisms.relative_positions import UnrolledRows
from mtp_train.upstream.transformers_private import CACHE, DynamicIndexedLayer

_INPUTS = 0
_SLOTS = 1


class Pools(NamedTuple):
    """All pools so far; a query may attend to some of them."""

    keys_BPX: Tensor
    slots_BPN: Tensor
    """Cache slots of each pool's keys, oldest first; -1 if there is no pool."""


class UnrolledPools(UnrolledRows, DynamicIndexedLayer):
    """Cache of keys and pools in an unroll, with the depths one after the other.

    The decoder's ``IndexedStore`` (``mtp_inference/cache/model_cache.py``) has the same two methods.

    Args:
        place_BT: int, number of depth-1 rows before each row in its document.
    """

    def __init__(self, place_BT: Tensor) -> None:
        super().__init__(place_BT)
        self._pools: Pools | None = None
        self._num_slots = 0

    def ending_with(self, inputs_BTX: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Store new tokens' inputs; return the inputs of the last ``size`` tokens at each token, and their slots.

        Returns:
            Inputs, (B, T, N, X), and slots, (B, T, N). Values before the start of a text are arbitrary.
        """
        num_tokens = inputs_BTX.shape[1]
        slots_T = torch.arange(num_tokens, device=inputs_BTX.device) + self._num_slots
        self._num_slots += num_tokens
        slots_BT1 = slots_T[:, None].expand(len(inputs_BTX), -1, -1)
        latest_first = (self.taps(inputs_BTX, _INPUTS, size), self.taps(slots_BT1, _SLOTS, size))
        inputs_BTNX, slots_BTN1 = (torch.stack(taps[::-1], dim=2) for taps in latest_first)
        return inputs_BTNX, slots_BTN1[..., 0]

    def write_pools(self, new: Pools, number_BT: Tensor) -> Pools:
        """Store the pool that ends with each new token if its number is at least 0; return all pools."""
        is_pool_BT = number_BT >= 0
        new = new._replace(slots_BPN=new.slots_BPN.masked_fill(~is_pool_BT[..., None], -1))
        # Only one token in N ends a pool: keep those alone, or N times as many pools would be scored.
        in_any_T = is_pool_BT.any(0)
        new = Pools(*(part[:, in_any_T] for part in new))
        if self._pools is not None:
            new = Pools(*(torch.cat([earlier, more], dim=1) for earlier, more in zip(self._pools, new, strict=True)))
        self._pools = new
        return new


class PoolIndexer:
    """The selection described above; :func:`choose_pools` makes a layer's indexer of transformers inherit from it.

    A subclass has two methods. ``pooled`` returns one key, (B, T, X), for each N inputs (oldest first). ``scores``
    returns the score of each pool for each query, (B, T, P), masked pools included.
    """

    def chosen(
        self: Any, inputs_BTX: Tensor, query: Any, seen_BTS: Tensor, cache: Cache | None, *, size: int, num_keys: int
    ) -> tuple[Tensor, Tensor]:
        """Return the slots of the keys that each query attends to.

        Args:
            inputs_BTX: Inputs of the new tokens' pools.
            seen_BTS: bool, True where a query may attend to a key.
            cache: Cache whose layer stores pools as :class:`UnrolledPools` does; None without earlier tokens.

        Returns:
            Slots of the best pools' keys, (B, T, num_keys), and of the incomplete pool's keys, (B, T, N); -1 for none.
        """
        # A query attends to one key at each position up to its own.
        place_BT = seen_BTS.sum(-1) - 1
        store: Any = UnrolledPools(place_BT) if cache is None else cache.layers[self.layer_idx]
        inputs_BTNX, ending_BTN = store.ending_with(inputs_BTX, size)
        num_left_BT = (place_BT + 1) % size
        number_BT = torch.where((place_BT >= 0) & (num_left_BT == 0), place_BT // size, -1)
        pools = store.write_pools(Pools(self.pooled(inputs_BTNX), ending_BTN), number_BT)
        age_N = torch.arange(size - 1, -1, -1, device=place_BT.device)
        rest_BTN = ending_BTN.masked_fill(age_N >= num_left_BT[..., None], -1)
        scores_BTP = self.scores(query, pools.keys_BPX)
        last_BP = pools.slots_BPN[..., -1]
        num_slots = seen_BTS.shape[-1]
        # A query may attend to a pool if it may attend to the pool's last key.
        there_B1P = ((last_BP >= 0) & (last_BP < num_slots))[:, None]
        seen_BTP = seen_BTS.gather(-1, last_BP.clamp(0, num_slots - 1)[:, None].expand_as(scores_BTP)) & there_B1P
        scores_BTP = scores_BTP.masked_fill(~seen_BTP, torch.finfo(scores_BTP.dtype).min)
        best_BTK = scores_BTP.topk(min(num_keys // size, scores_BTP.shape[-1]), dim=-1).indices
        rows_B11 = torch.arange(len(best_BTK), device=best_BTK.device)[:, None, None]
        slots_BTKN = pools.slots_BPN[rows_B11, best_BTK].masked_fill(~seen_BTP.gather(-1, best_BTK)[..., None], -1)
        return slots_BTKN.flatten(2), rest_BTN


class GatedPools(PoolIndexer):
    """GLM-5-Next's indexer: a pool's key is the sum of its keys, gated per channel; weighted heads score it."""

    @torch.no_grad()
    def forward(
        self: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, **given: Cache | None
    ) -> Tensor:
        """Return the slots of selected keys, int (B, T, K), -1 for none, like transformers' indexer.

        Args:
            attention_mask: bool, (B, 1, T, S), True where a query may attend to a key. In a forward of transformers it
                has shape (B, T), and transformers' own indexer runs.
            given: The cache under transformers' name, see :meth:`PoolIndexer.chosen`.
        """
        if attention_mask.ndim == 2:
            return super().forward(hidden_states, q_resid, attention_mask, **given)  # type: ignore[misc]
        gates = functional.linear(hidden_states, self.index_kpool_compress_gate)
        query_BTHX = self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim))
        weights_BTH = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
        best_BTK, rest_BTN = self.chosen(
            torch.cat([self.k_norm(self.wk(hidden_states)), gates], dim=-1),
            (query_BTHX, weights_BTH),
            attention_mask[:, 0],
            given[CACHE],
            size=self.index_kpool,
            num_keys=self.index_topk,
        )
        return torch.cat([best_BTK, rest_BTN], dim=-1) if self.index_kpool_always_select_tail else best_BTK

    def pooled(self: Any, inputs_BTNX: Tensor) -> Tensor:
        """Return the weighted sum of the keys."""
        keys_BTNX, gates_BTNX = inputs_BTNX.chunk(2, dim=-1)
        weights_BTNX = (gates_BTNX.float() + self.index_kpool_compress_ape.float()).softmax(dim=2)
        return (weights_BTNX.to(keys_BTNX.dtype) * keys_BTNX).sum(2)

    def scores(self: Any, query: tuple[Tensor, Tensor], keys_BPX: Tensor) -> Tensor:
        """Return the weighted sum of the heads' positive scores."""
        query_BTHX, weights_BTH = query
        products_BTHP = query_BTHX.float() @ keys_BPX.transpose(1, 2).float().unsqueeze(1)
        return (weights_BTH.unsqueeze(-2) @ functional.relu(products_BTHP * self.softmax_scale)).squeeze(-2)


class AveragedPools(PoolIndexer):
    """Qwen4-Exp's indexer: a pool's key is the mean of its keys, normed, and rotated to the first key's position."""

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Cache | None,
    ) -> Tensor:
        """Return the mask of selected keys, bool (B, 1, T, S), like transformers' indexer.

        Args:
            position_embeddings: Cosines and sines, (B, T, rotated width) each.
            attention_mask: (B, 1, T, S), True (or 0) where a query may attend to a key.
            cache: See :meth:`PoolIndexer.chosen`; with a cache of transformers its own indexer runs.
        """
        if cache is not None and not hasattr(cache.layers[self.layer_idx], "write_pools"):
            return super().forward(hidden_states, position_embeddings, attention_mask, cache)  # type: ignore[misc]
        seen_BTS = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        width = self.index_n_heads * self.index_head_dim
        query_BTX, keys_BTX = self.index_qk_proj(hidden_states).tensor_split([width], dim=-1)
        query_BTHX = self.q_layernorm(query_BTX.unflatten(-1, (-1, self.index_head_dim)))
        cos_BTX, sin_BTX = (part.expand(len(query_BTX), -1, -1) for part in position_embeddings)
        best_BTK, rest_BTN = self.chosen(
            torch.cat([keys_BTX, cos_BTX, sin_BTX], dim=-1),
            rotated(query_BTHX, cos_BTX.unsqueeze(2), sin_BTX.unsqueeze(2)),
            seen_BTS,
            cache,
            size=self.compress_ratio,
            num_keys=self.token_budget,
        )
        slots_BTK = torch.cat([best_BTK, rest_BTN], dim=-1)
        num_keys = seen_BTS.shape[-1]
        # Slots of -1 are written to one extra column, which is cut off.
        shown_BTS = seen_BTS.new_zeros(*slots_BTK.shape[:2], num_keys + 1)
        shown_BTS.scatter_(-1, torch.where(slots_BTK < 0, num_keys, slots_BTK).clamp(max=num_keys), True)
        return shown_BTS[:, None, :, :num_keys]

    def pooled(self: Any, inputs_BTNX: Tensor) -> Tensor:
        """Return the mean of the keys, normed and rotated."""
        keys_BTNX, angles_BTNX = inputs_BTNX.tensor_split([self.index_head_dim], dim=-1)
        key_BTX = self.k_layernorm(keys_BTNX.float().mean(2).to(keys_BTNX.dtype))
        return rotated(key_BTX, *angles_BTNX[:, :, 0].chunk(2, dim=-1))

    def scores(self: Any, query: Tensor, keys_BPX: Tensor) -> Tensor:
        """Return the sum of the heads' positive scores."""
        products_BTHP = query.float() @ keys_BPX.transpose(1, 2).float().unsqueeze(1)
        return functional.relu(products_BTHP).sum(2) / math.sqrt(self.index_head_dim)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states whose first channels are rotated by halves; the other channels are unchanged."""
    turned, rest = states.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def choose_pools(part: nn.Module, *, kind: type[PoolIndexer]) -> None:
    """Make transformers' indexers in a layer or a decoder inherit from ``kind``; their weights stay unchanged."""
    for module in part.modules():
        # Some layers have no indexer and reuse the keys that the layer before has selected.
        indexer = getattr(module, "indexer", None)
        if indexer is not None and not isinstance(indexer, PoolIndexer):
            indexer.__class__ = type(kind.__name__, (kind, type(indexer)), {})
