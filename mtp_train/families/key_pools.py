"""Attention to chosen pools of keys, with every row of a batch at a position of its own.

GLM-5-Next's indexer makes one key of every N consecutive ones of a text (a "pool"), scores the pools and keeps the keys
of the best ones, and those that do not fill a pool yet. transformers takes a key's place among all keys for its
position, and pads only on the left. In the training unroll the keys of later depths lie after all of the first, and
packed documents one after the other; in decoding rows stand at different places. Here every token makes the pool that
would end with it out of the inputs that come before its own, and that counts where so many keys fill a pool.

Shapes: B rows, T queries, S keys, N keys of a pool, P pools, X width of the indexer, K chosen keys.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import DynamicIndexedLayer

from mtp_train.families.relative import UnrolledRows

_MODULE = "transformers.models.glm5_next.modeling_glm5_next"
_TAKEN = (
    *("layer_idx", "n_heads", "head_dim", "softmax_scale", "index_topk", "index_kpool"),
    *("index_kpool_always_select_tail", "wq_b", "wk", "k_norm", "weights_proj"),
    *("index_kpool_compress_ape", "index_kpool_compress_gate"),
)
"""What transformers' indexer has that ours reads, weights under their names."""
_INPUTS, _SLOTS = 0, 1


class Pools(NamedTuple):
    """Pools that were made so far, of which a query may see some."""

    keys_BPX: Tensor
    slots_BPN: Tensor
    """Where the keys of each lie, oldest first; -1 where there is no pool."""


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

    def ending_with(self, inputs_BTX: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :class:`PoolStore`."""
        num_before = 0 if self._pools is None else self._pools.keys_BPX.shape[1]
        slots_T = torch.arange(inputs_BTX.shape[1], device=inputs_BTX.device) + num_before
        slots_BT1 = slots_T[:, None].expand(len(inputs_BTX), -1, -1)
        latest_first = (self.taps(inputs_BTX, _INPUTS, size), self.taps(slots_BT1, _SLOTS, size))
        inputs_BTNX, slots_BTN1 = (torch.stack(taps[::-1], dim=2) for taps in latest_first)
        return inputs_BTNX, slots_BTN1[..., 0]

    def write_pools(self, new: Pools, number_BT: Tensor) -> Pools:
        """See :class:`PoolStore`."""
        new = new._replace(slots_BPN=new.slots_BPN.masked_fill((number_BT < 0)[..., None], -1))
        if self._pools is not None:
            new = Pools(*(torch.cat([earlier, more], dim=1) for earlier, more in zip(self._pools, new, strict=True)))
        self._pools = new
        return new


class PoolIndexer(nn.Module):
    """The indexer of a head's layer.

    Args:
        stock: transformers' indexer of the layer.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        for name in _TAKEN:
            setattr(self, name, getattr(stock, name))

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None
    ) -> Tensor:
        """See :func:`chosen_keys`."""
        return chosen_keys(self, hidden_states, q_resid, attention_mask, past_key_values)


@contextmanager
def choosing_in_windows() -> Iterator[None]:
    """Make the trunk's indexers choose as described above meanwhile, with a :class:`PoolStore` for each in the cache.

    The replacement is a class attribute, seen by every thread.
    """
    indexer = importlib.import_module(_MODULE).Glm5NextTextIndexer
    stock = indexer.forward
    indexer.forward = chosen_keys
    try:
        yield
    finally:
        indexer.forward = stock


def chosen_keys(
    indexer: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor | None, past_key_values: Cache | None
) -> Tensor:
    """Choose the keys that each query sees (hence the arguments: transformers' own).

    Args:
        indexer: What holds the weights.
        hidden_states: Shape (B, T, D).
        q_resid: Shape (B, T, query rank).
        attention_mask: bool, (B, 1, T, S), True where a query may see a key; None is plain causal attention.
        past_key_values: Its layer is a :class:`PoolStore`; None where nothing comes before.

    Returns:
        int32 (B, T, K): slots of keys, -1 for none.
    """
    num_rows, num_tokens = hidden_states.shape[:2]
    if attention_mask is None:
        attention_mask = torch.ones(num_rows, 1, num_tokens, num_tokens, dtype=torch.bool).tril().to(q_resid.device)
    seen_BTS = attention_mask[:, 0]
    # A query sees one key at each place of its text, its own last.
    place_BT = seen_BTS.sum(-1) - 1
    store: Any = UnrolledPools(place_BT) if past_key_values is None else past_key_values.layers[indexer.layer_idx]
    size = indexer.index_kpool

    inputs_BTX = torch.cat(
        [
            indexer.k_norm(indexer.wk(hidden_states)),
            functional.linear(hidden_states, indexer.index_kpool_compress_gate),
        ],
        dim=-1,
    )
    inputs_BTNX, ending_BTN = store.ending_with(inputs_BTX, size)
    keys_BTNX, gates_BTNX = inputs_BTNX.chunk(2, dim=-1)
    weights_BTNX = (gates_BTNX.float() + indexer.index_kpool_compress_ape.float()).softmax(dim=2).to(keys_BTNX.dtype)
    fills_BT = (place_BT >= 0) & ((place_BT + 1) % size == 0)
    pools = store.write_pools(
        Pools((weights_BTNX * keys_BTNX).sum(2), ending_BTN), torch.where(fills_BT, place_BT // size, -1)
    )
    chosen_BTK = _best(pools, _scores(indexer, hidden_states, q_resid, pools.keys_BPX), seen_BTS, indexer)
    if indexer.index_kpool_always_select_tail:
        num_left_BT1 = ((place_BT + 1) % size)[..., None]
        newest_first_N = torch.arange(size - 1, -1, -1, device=place_BT.device)
        tail_BTN = ending_BTN.masked_fill(newest_first_N >= num_left_BT1, -1)
        chosen_BTK = torch.cat([chosen_BTK, tail_BTN], dim=-1)
    return chosen_BTK.to(torch.int32)


def _scores(indexer: Any, hidden_BTD: Tensor, q_resid: Tensor, keys_BPX: Tensor) -> Tensor:
    """Return how well each pool fits each query: the heads' positive scores, weighted. Shape (B, T, P)."""
    query_BTHX = indexer.wq_b(q_resid).unflatten(-1, (-1, indexer.head_dim))
    scores_BTHP = functional.relu(
        query_BTHX.float() @ keys_BPX.transpose(1, 2).float().unsqueeze(1) * indexer.softmax_scale
    )
    weights_BTH = indexer.weights_proj(hidden_BTD.to(indexer.weights_proj.weight.dtype)).float()
    scores_BTP: Tensor = (weights_BTH * indexer.n_heads**-0.5).unsqueeze(-2) @ scores_BTHP
    return scores_BTP.squeeze(-2)


def _best(pools: Pools, scores_BTP: Tensor, seen_BTS: Tensor, indexer: Any) -> Tensor:
    """Return the slots of the best pools' keys, (B, T, chosen pools * N), -1 for none: a pool is seen with its last."""
    last_BP, num_keys = pools.slots_BPN[..., -1], seen_BTS.shape[-1]
    there_B1P = ((last_BP >= 0) & (last_BP < num_keys))[:, None]
    seen_BTP = seen_BTS.gather(-1, last_BP.clamp(0, num_keys - 1)[:, None].expand_as(scores_BTP)) & there_B1P
    scores_BTP = scores_BTP.masked_fill(~seen_BTP, torch.finfo(scores_BTP.dtype).min)
    best_BTK = scores_BTP.topk(min(indexer.index_topk // indexer.index_kpool, scores_BTP.shape[-1]), dim=-1).indices
    rows_B11 = torch.arange(len(best_BTK), device=best_BTK.device)[:, None, None]
    slots_BTKN = pools.slots_BPN[rows_B11, best_BTK].masked_fill(~seen_BTP.gather(-1, best_BTK)[..., None], -1)
    return slots_BTKN.flatten(2)
