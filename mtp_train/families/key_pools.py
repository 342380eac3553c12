"""Attention to chosen pools of keys, with every row of a batch at a position of its own.

An indexer makes one key of every N consecutive ones of a text (a "pool"), scores the pools, and keeps the keys of the
best ones, and those that do not fill a pool yet. transformers takes a key's place among all keys for its position. In
the training unroll the keys of later depths lie after all of the first, and packed documents one after the other; in
decoding rows stand at different places. Here every token makes the pool that would end with it out of the inputs that
come before its own, and that counts where so many keys fill a pool.

Shapes: B rows, T queries, S keys, N keys of a pool, P pools, X width of a pool's key, K chosen keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import DynamicIndexedLayer

from mtp_train.families.relative import UnrolledRows

_INPUTS, _SLOTS = 0, 1


class Pools(NamedTuple):
    """Pools that were made so far, of which a query may see some."""

    keys_BPX: Tensor
    slots_BPN: Tensor
    """Where the keys of each lie, oldest first; -1 where there is no pool."""


@runtime_checkable
class PoolStore(Protocol):
    """What a layer's cache keeps for its indexer beside its keys."""

    def ending_with(self, inputs_BTX: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Keep new tokens' inputs; return those of ``size`` tokens that end with each, (B, T, N, X), and their slots.

        What comes before a text is anything.
        """

    def write_pools(self, new: Pools, number_BT: Tensor) -> Pools:
        """Keep the pool that ends with each new token, where it has a number from 0 on (else -1); return all."""


class UnrolledPools(UnrolledRows, DynamicIndexedLayer):
    """Keys and pools of all depths of an unroll, one after the other.

    Args:
        place_BT: int, how many rows of depth 1 come before each in its document.
    """

    def __init__(self, place_BT: Tensor) -> None:
        super().__init__(place_BT)
        self._pools: Pools | None = None
        self._num_slots = 0

    def ending_with(self, inputs_BTX: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :class:`PoolStore`."""
        num_tokens = inputs_BTX.shape[1]
        slots_T = torch.arange(num_tokens, device=inputs_BTX.device) + self._num_slots
        self._num_slots += num_tokens
        slots_BT1 = slots_T[:, None].expand(len(inputs_BTX), -1, -1)
        latest_first = (self.taps(inputs_BTX, _INPUTS, size), self.taps(slots_BT1, _SLOTS, size))
        inputs_BTNX, slots_BTN1 = (torch.stack(taps[::-1], dim=2) for taps in latest_first)
        return inputs_BTNX, slots_BTN1[..., 0]

    def write_pools(self, new: Pools, number_BT: Tensor) -> Pools:
        """See :class:`PoolStore`."""
        is_pool_BT = number_BT >= 0
        new = new._replace(slots_BPN=new.slots_BPN.masked_fill(~is_pool_BT[..., None], -1))
        # Few tokens end a pool: scores of all of them would be most of what there is.
        in_any_T = is_pool_BT.any(0)
        new = Pools(*(part[:, in_any_T] for part in new))
        if self._pools is not None:
            new = Pools(*(torch.cat([earlier, more], dim=1) for earlier, more in zip(self._pools, new, strict=True)))
        self._pools = new
        return new


class PoolIndexer:
    """Chooses as described above; :func:`choose_pools` puts it before transformers' indexer of a layer."""

    layer_idx: int

    def pooled(self, inputs_BTNX: Tensor) -> Tensor:
        """Return a key of each N inputs, oldest first. Shape (B, T, X)."""
        raise NotImplementedError

    def scores(self, query: Any, keys_BPX: Tensor) -> Tensor:
        """Return how well each pool fits each query, whether it may be seen or not. Shape (B, T, P)."""
        raise NotImplementedError

    def chosen(
        self, inputs_BTX: Tensor, query: Any, seen_BTS: Tensor, cache: Cache | None, *, size: int, num_keys: int
    ) -> tuple[Tensor, Tensor]:
        """Return the slots of the keys that each query sees.

        Args:
            inputs_BTX: What the pools of the new tokens are made of.
            query: What :meth:`scores` takes.
            seen_BTS: bool, True where a query may see a key.
            cache: Its layer is a :class:`PoolStore`; None where nothing comes before.
            size: N.
            num_keys: Most keys to choose.

        Returns:
            Those of the best pools, (B, T, num_keys), and those that do not fill a pool, (B, T, N); -1 for none.
        """
        # A query sees one key at each place of its text, its own last.
        place_BT = seen_BTS.sum(-1) - 1
        store: Any = UnrolledPools(place_BT) if cache is None else cache.layers[self.layer_idx]
        inputs_BTNX, ending_BTN = store.ending_with(inputs_BTX, size)
        num_left_BT = (place_BT + 1) % size
        number_BT = torch.where((place_BT >= 0) & (num_left_BT == 0), place_BT // size, -1)
        pools = store.write_pools(Pools(self.pooled(inputs_BTNX), ending_BTN), number_BT)
        age_N = torch.arange(size - 1, -1, -1, device=place_BT.device)
        rest_BTN = ending_BTN.masked_fill(age_N >= num_left_BT[..., None], -1)
        return _best(pools, self.scores(query, pools.keys_BPX), seen_BTS, num_keys // size), rest_BTN


def _best(pools: Pools, scores_BTP: Tensor, seen_BTS: Tensor, num_chosen: int) -> Tensor:
    """Return the slots of the best pools' keys, (B, T, num_chosen * N), -1 for none: a pool is seen with its last."""
    last_BP, num_keys = pools.slots_BPN[..., -1], seen_BTS.shape[-1]
    there_B1P = ((last_BP >= 0) & (last_BP < num_keys))[:, None]
    seen_BTP = seen_BTS.gather(-1, last_BP.clamp(0, num_keys - 1)[:, None].expand_as(scores_BTP)) & there_B1P
    scores_BTP = scores_BTP.masked_fill(~seen_BTP, torch.finfo(scores_BTP.dtype).min)
    best_BTK = scores_BTP.topk(min(num_chosen, scores_BTP.shape[-1]), dim=-1).indices
    rows_B11 = torch.arange(len(best_BTK), device=best_BTK.device)[:, None, None]
    slots_BTKN = pools.slots_BPN[rows_B11, best_BTK].masked_fill(~seen_BTP.gather(-1, best_BTK)[..., None], -1)
    return slots_BTKN.flatten(2)


class GatedPools(PoolIndexer):
    """GLM-5-Next's: gates weigh the keys of a pool, for each channel by itself; small heads score, and are weighted."""

    wq_b: Any
    wk: Any
    k_norm: Any
    weights_proj: Any
    index_kpool_compress_ape: Tensor
    index_kpool_compress_gate: Tensor
    index_kpool: int
    index_topk: int
    index_kpool_always_select_tail: bool
    n_heads: int
    head_dim: int
    softmax_scale: float

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, past_key_values: Cache | None
    ) -> Tensor:
        """Return slots of keys, int (B, T, K), -1 for none, as transformers' indexer does.

        Args:
            hidden_states: Shape (B, T, D).
            q_resid: Shape (B, T, query rank).
            attention_mask: bool, (B, 1, T, S), True where a query may see a key; (B, T), where transformers runs it.
            past_key_values: See :meth:`PoolIndexer.chosen`.
        """
        if attention_mask.ndim == 2:
            stock: Tensor = super().forward(hidden_states, q_resid, attention_mask, past_key_values)  # type: ignore[misc]
            return stock
        gates = functional.linear(hidden_states, self.index_kpool_compress_gate)
        query_BTHX = self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim))
        weights_BTH = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
        best_BTK, rest_BTN = self.chosen(
            torch.cat([self.k_norm(self.wk(hidden_states)), gates], dim=-1),
            (query_BTHX, weights_BTH),
            attention_mask[:, 0],
            past_key_values,
            size=self.index_kpool,
            num_keys=self.index_topk,
        )
        return torch.cat([best_BTK, rest_BTN], dim=-1) if self.index_kpool_always_select_tail else best_BTK

    def pooled(self, inputs_BTNX: Tensor) -> Tensor:
        """Return the weighted sum of the keys."""
        keys_BTNX, gates_BTNX = inputs_BTNX.chunk(2, dim=-1)
        weights_BTNX = (gates_BTNX.float() + self.index_kpool_compress_ape.float()).softmax(dim=2)
        return (weights_BTNX.to(keys_BTNX.dtype) * keys_BTNX).sum(2)

    def scores(self, query: tuple[Tensor, Tensor], keys_BPX: Tensor) -> Tensor:
        """Return the heads' positive scores, weighted."""
        query_BTHX, weights_BTH = query
        products_BTHP = query_BTHX.float() @ keys_BPX.transpose(1, 2).float().unsqueeze(1)
        return (weights_BTH.unsqueeze(-2) @ functional.relu(products_BTHP * self.softmax_scale)).squeeze(-2)


class AveragedPools(PoolIndexer):
    """Qwen4-Exp's: a pool's key is the mean of its keys, normed and rotated to where the first one stands."""

    index_qk_proj: Any
    q_layernorm: Any
    k_layernorm: Any
    index_n_heads: int
    index_head_dim: int
    token_budget: int
    compress_ratio: int

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Return which keys each query sees, bool (B, 1, T, S), as transformers' indexer does.

        Args:
            hidden_states: Shape (B, T, D).
            position_embeddings: Cosines and sines, (B, T, rotated width) each.
            attention_mask: (B, 1, T, S), True (or 0) where a query may see a key.
            past_key_values: See :meth:`PoolIndexer.chosen`; transformers' own, where transformers runs it.
        """
        if past_key_values is not None and not isinstance(past_key_values.layers[self.layer_idx], PoolStore):
            stock: Tensor = super().forward(  # type: ignore[misc]
                hidden_states, position_embeddings, attention_mask, past_key_values
            )
            return stock
        seen_BTS = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        width = self.index_n_heads * self.index_head_dim
        query_BTX, keys_BTX = self.index_qk_proj(hidden_states).tensor_split([width], dim=-1)
        query_BTHX = self.q_layernorm(query_BTX.unflatten(-1, (-1, self.index_head_dim)))
        cos_BTX, sin_BTX = (part.expand(len(query_BTX), -1, -1) for part in position_embeddings)
        best_BTK, rest_BTN = self.chosen(
            torch.cat([keys_BTX, cos_BTX, sin_BTX], dim=-1),
            rotated(query_BTHX, cos_BTX.unsqueeze(2), sin_BTX.unsqueeze(2)),
            seen_BTS,
            past_key_values,
            size=self.compress_ratio,
            num_keys=self.token_budget,
        )
        slots_BTK = torch.cat([best_BTK, rest_BTN], dim=-1)
        num_keys = seen_BTS.shape[-1]
        # What is no key is one more, which nobody sees.
        shown_BTS = seen_BTS.new_zeros(*slots_BTK.shape[:2], num_keys + 1)
        shown_BTS.scatter_(-1, torch.where(slots_BTK < 0, num_keys, slots_BTK).clamp(max=num_keys), True)
        return shown_BTS[:, None, :, :num_keys]

    def pooled(self, inputs_BTNX: Tensor) -> Tensor:
        """Return the mean of the keys, normed and rotated."""
        keys_BTNX, angles_BTNX = inputs_BTNX.tensor_split([self.index_head_dim], dim=-1)
        key_BTX = self.k_layernorm(keys_BTNX.float().mean(2).to(keys_BTNX.dtype))
        return rotated(key_BTX, *angles_BTNX[:, :, 0].chunk(2, dim=-1))

    def scores(self, query: Tensor, keys_BPX: Tensor) -> Tensor:
        """Return the heads' positive scores, all alike."""
        products_BTHP = query.float() @ keys_BPX.transpose(1, 2).float().unsqueeze(1)
        return functional.relu(products_BTHP).sum(2) / math.sqrt(self.index_head_dim)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return states whose first channels are rotated by halves, the rest as it is."""
    turned, rest = states.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def choose_pools(indexer: nn.Module, kind: type[PoolIndexer]) -> None:
    """Make an indexer of transformers choose as ours do, which know places better; its weights stay as they are."""
    if not isinstance(indexer, PoolIndexer):
        indexer.__class__ = type(kind.__name__, (kind, type(indexer)), {})
