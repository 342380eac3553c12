"""Attention to compressed keys, for batches whose rows are at different positions.

DeepSeek V4's layers attend to a sliding window of keys, and to one compressed key ("entry") per group of N earlier
positions. transformers computes an entry when a call completes a group, and buffers the inputs of an incomplete group.
All rows must then be at one position, and a token cannot be rolled back. Here the inputs are stored by position, and
every group that a window may complete is computed again from them. Entries of rejected drafts are thereby overwritten
before a token attends to them: a token at position p attends to the entries of the groups that are complete at p.

The decoder's caches store inputs and entries, by the name of each compressor: ``CompressedStore`` in
``mtp_inference/cache/model_cache.py``.

Shapes: B rows, T tokens of a window, G groups, N positions of a group, E entries, X width, K selected entries.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtp_train.upstream.transformers_private import replacing

COMPRESSED_CACHE_LAYERS = ("DeepseekV4CSACache", "DeepseekV4HCACache")
"""transformers' cache classes for such layers, by name: importing them would import the model."""
_MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"


@contextmanager
def compressing_in_windows() -> Iterator[None]:
    """Replace the layers' compression by ours within the context; each layer needs the decoder's cache."""
    module = importlib.import_module(_MODULE)
    all_entries = replacing(module.DeepseekV4HCACompressor, forward=_all_entries)
    with all_entries, replacing(module.DeepseekV4CSACompressor, forward=_chosen_entries):
        yield


def _all_entries(
    compressor: Any, hidden_BTD: Tensor, _queries: Tensor, positions_BT: Tensor, cache: Any, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """Return a layer's entries, (B, 1, E, X), and the mask of entries that each token attends to, bool (B, 1, T, E)."""
    entries_BEX = _compressed(compressor, "compressor", hidden_BTD, cache.layers[layer_idx])
    numbers_E = torch.arange(entries_BEX.shape[1], device=positions_BT.device)
    num_complete_BT = (positions_BT + 1) // compressor.compress_rate
    return entries_BEX[:, None], (numbers_E < num_complete_BT[..., None])[:, None]


def _chosen_entries(
    compressor: Any, hidden_BTD: Tensor, queries_BTX: Tensor, positions_BT: Tensor, cache: Any, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """Return the same for a layer whose indexer selects K entries for each token."""
    entries_B1EX, seen_B1TE = _all_entries(compressor, hidden_BTD, queries_BTX, positions_BT, cache, layer_idx)
    indexer = compressor.indexer
    keys_BEX = _compressed(indexer, "indexer", hidden_BTD, cache.layers[layer_idx])
    query_BTHX = indexer.q_b_proj(queries_BTX).unflatten(-1, (-1, indexer.head_dim))
    query_BTHX = _rotated(indexer, query_BTHX.transpose(1, 2), positions_BT).transpose(1, 2)
    scores_B1TE = indexer.scorer(query_BTHX, keys_BEX, hidden_BTD)[:, None].masked_fill(~seen_B1TE, -torch.inf)
    chosen_B1TK = scores_B1TE.topk(min(indexer.index_topk, keys_BEX.shape[1]), dim=-1).indices
    return entries_B1EX, seen_B1TE & torch.zeros_like(seen_B1TE).scatter(-1, chosen_B1TK, True)


def _compressed(compressor: Any, name: str, hidden_BTD: Tensor, store: Any) -> Tensor:
    """Compute the entries of every group that the window may complete; return all entries in use, (B, E, X).

    An entry is the sum of its group's inputs, weighted per channel by the softmax of their gates. If the compressor's
    inputs have twice the width, the sum is over the first half of the group before and the second half of its own.
    """
    inputs_BTX = torch.cat([compressor.kv_proj(hidden_BTD), compressor.gate_proj(hidden_BTD)], dim=-1)
    groups_BG, inputs_BGNX = store.groups(name, inputs_BTX)
    values_BGNX, gates_BGNX = inputs_BGNX.chunk(2, dim=-1)
    gates_BGNX = gates_BGNX + compressor.position_bias
    width = compressor.head_dim
    if values_BGNX.shape[-1] > width:
        no_group_BG111 = (groups_BG < 0)[:, :, None, None]
        gates_BGNX = gates_BGNX.masked_fill(no_group_BG111, -torch.inf)
        values_BGNX, gates_BGNX = (
            torch.cat([both[:, :-1, :, :width], both[:, 1:, :, width:]], dim=2) for both in (values_BGNX, gates_BGNX)
        )
    else:
        values_BGNX = values_BGNX[:, 1:]
        gates_BGNX = gates_BGNX[:, 1:]
    weights_BGNX = gates_BGNX.softmax(dim=2, dtype=torch.float32).to(values_BGNX.dtype)
    entries_BGX = compressor.kv_norm((values_BGNX * weights_BGNX).sum(dim=2))
    groups_BG = groups_BG[:, 1:]
    entries_BGX = _rotated(compressor, entries_BGX[:, None], groups_BG * compressor.compress_rate)[:, 0]
    return store.write_entries(name, groups_BG, entries_BGX)


def _rotated(compressor: Any, states_BHTX: Tensor, positions_BT: Tensor) -> Tensor:
    cos, sin = compressor.rotary_emb(states_BHTX, position_ids=positions_BT, layer_type=compressor.rope_layer_type)
    rotate: Any = importlib.import_module(_MODULE).apply_rotary_pos_emb
    return rotate(states_BHTX, cos, sin)
