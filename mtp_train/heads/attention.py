"""Compute attention in heads and in the decoder: a function that is registered with transformers in place of ``sdpa``.

It takes boolean masks for every model, and it adds what ``sdpa`` leaves out:

- attention sinks: a learned logit for each head that only enlarges the softmax denominator;
- scores bounded by a tanh;
- sparse attention to keys that an indexer chose.

:func:`without_cudnn_attention` chooses among torch's kernels for ``scaled_dot_product_attention``.

Shapes: B rows, T queries, S keys, H heads, K chosen keys.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from mtp_train.heads.alignment import UnrollMask
from mtp_train.heads.query_blocks import BLOCK_QUERIES, attend_in_blocks
from mtp_train.upstream.transformers_private import sdpa_attention_forward, sdpa_mask

HEAD_ATTENTION = "mtp_masked"
EAGER_KEYS = 1024
"""Most keys of a block of queries whose scores a bf16 training step keeps for its backward pass."""
_lock = threading.Lock()
_inside = 0
_enabled_before = True


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's kernels for ``scaled_dot_product_attention`` inside this context or decorated function.

    torch has one setting for the whole process. Importing this package leaves it unchanged, and so does a finished
    forward: the last thread to leave restores the value that the first one found. Until then, other threads run without
    cuDNN too. The backward pass uses the kernels of its forward pass; a recomputed forward chooses again.
    """
    global _inside, _enabled_before
    backends = torch.backends.cuda
    with _lock:
        if _inside == 0:
            _enabled_before = backends.cudnn_sdp_enabled()
            backends.enable_cudnn_sdp(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                backends.enable_cudnn_sdp(_enabled_before)


def masked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | UnrollMask | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa`` does, which fixes the arguments, with attention sinks and chosen keys.

    Args:
        query: Shape (B, H, T, width).
        key, value: Shape (B, key heads, S, width), each with a width of its own.
        attention_mask: bool, broadcast to (B, 1, T, S), True where a query attends to a key; None is causal. The mask
            of an unroll is built for some queries at a time. Layers that depend on distances get int64 from a cache of
            ours: the distance, or -1 where a query does not attend.
        options: What :func:`_attend_by_mask` adds, and the arguments of ``sdpa``.

    Returns:
        Shape (B, T, H, width), and None for the attention weights.
    """
    if not isinstance(attention_mask, UnrollMask):
        return _attend_by_mask(module, query, key, value, attention_mask, **options)
    sinks = options.pop("s_aux", None)

    # The backward pass calls it outside of the forward's contexts.
    @without_cudnn_attention()
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
        return _attend_by_mask(module, query, key, value, mask, sinks, **options)[0]

    scaling = float(options["scaling"]) if sinks is options.get("softcap") is None else None
    return attend_in_blocks(attend, query, key, value, attention_mask, sinks, scaling), None


def _attend_by_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend by a mask, with what ``sdpa`` leaves out, under transformers' names.

    Args:
        s_aux: Shape (H,), the sink of each head.
        softcap: The c of ``c tanh(scores / c)`` (Gemma 2, arXiv:2408.00118, section 2).
        position_bias: Added to the scores, (B, H, T, S); where the mask contains distances, (B, H, T, E) by distance.
        indices: int, shape (B, T, K), the keys that each query may attend to.
        block_indices: The blocks of keys that each query may attend to, in the indexer's format.
    """
    if attention_mask is None:
        if all(one is None for one in (s_aux, softcap, indices, block_indices)):
            return sdpa_attention_forward(module, query, key, value, None, position_bias=position_bias, **options)
        num_queries = query.shape[2]
        num_keys = key.shape[2]
        whole_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=key.device)
        attention_mask = whole_TS.tril(num_keys - num_queries)[None, None]
    if indices is not None:
        chosen_BTS = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        attention_mask = attention_mask & chosen_BTS.scatter(-1, indices.long(), True)[:, None]
    if block_indices is not None:
        indexer = cast(Any, module.indexer)
        attention_mask = indexer.build_block_mask(
            block_indices, attention_mask, key.shape[2], query.dtype, query.device, options["position_ids"]
        )
    if softcap is not None:
        return _attend_eagerly(query, key, value, attention_mask, float(options["scaling"]), softcap), None
    if attention_mask.dtype == torch.int64:
        profiles = cast(Any, module).rel_logits_proj
        query, attention_mask = profiles.at_distances(query, position_bias, attention_mask)
    elif position_bias is not None:
        options["position_bias"] = position_bias
    if s_aux is not None:
        # An attention sink adds to the softmax denominator but has no value vector: one key more, with value 0.
        bias = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
        sink_B1T1 = s_aux.to(query.dtype)[None, :, None, None].expand(query.shape[0], -1, query.shape[2], 1)
        attention_mask = torch.cat([bias.expand(*sink_B1T1.shape[:3], -1), sink_B1T1], dim=-1)
        key, value = (torch.nn.functional.pad(one, (0, 0, 0, 1)) for one in (key, value))
    if 1 < attention_mask.shape[1] < query.shape[1]:
        return _attend_in_groups(module, query, key, value, attention_mask, **options)
    is_shared = attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if is_shared and position_bias is None and query.device.type == "cpu" and query.shape[2] > BLOCK_QUERIES:
        return _attend_in_blocks(module, query, key, value, attention_mask, **options), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _attend_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend in single operations, as torch's fused attention bounds no scores. Shape (B, T, H, width)."""
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    scores_BHTS = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    # The lowest finite number, as a row of padding attends to no key: with minus infinity its softmax would be NaN.
    scores_BHTS = scores_BHTS.masked_fill(~attention_mask, torch.finfo(scores_BHTS.dtype).min)
    return (scores_BHTS.softmax(dim=-1) @ value).transpose(1, 2).contiguous()


def _attend_in_groups(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attend with one mask for each group of heads, (B, groups, T, S), by treating the groups as more rows.

    Expanding the mask to every head would take more memory than all other tensors of the layer.
    """
    num_rows, groups = attention_mask.shape[:2]
    query, key, value = (one.reshape(num_rows * groups, -1, *one.shape[2:]) for one in (query, key, value))
    grouped, _ = sdpa_attention_forward(module, query, key, value, attention_mask.flatten(0, 1)[:, None], **options)
    return grouped.unflatten(0, (num_rows, groups)).transpose(1, 2).flatten(2, 3), None


def _attend_in_blocks(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> Tensor:
    """Attend from some queries of a row at a time to the keys that one of them attends to. Shape (B, T, H, width).

    torch's kernel for CPUs computes the scores that a mask removes, too: of packed documents and of an unroll (where a
    query attends to one key of each later depth) these are most.
    """
    rows = []
    mask_BTS = attention_mask[:, 0].expand(len(query), query.shape[2], key.shape[2])
    # Parts of a split have their gradients joined once; those of slices are summed, each as large as the whole.
    for query_1HTW, key_1JSW, value_1JSW, mask_TS in zip(
        query.split(1), key.split(1), value.split(1), mask_BTS, strict=True
    ):
        blocks = []
        for part_1HQW, mask_QS in zip(query_1HTW.split(BLOCK_QUERIES, 2), mask_TS.split(BLOCK_QUERIES), strict=True):
            keys_K = mask_QS.any(0).nonzero()[:, 0]
            key_1JKW, value_1JKW = (one.index_select(2, keys_K) for one in (key_1JSW, value_1JSW))
            mask_11QK = mask_QS.index_select(1, keys_K)[None, None]
            # torch's kernel recomputes the scores in its backward pass, with products that are slow in bf16.
            if part_1HQW.requires_grad and part_1HQW.dtype == torch.bfloat16 and len(keys_K) <= EAGER_KEYS:
                blocks.append(_attend_eagerly(part_1HQW, key_1JKW, value_1JKW, mask_11QK, float(options["scaling"])))
                continue
            found, _ = sdpa_attention_forward(module, part_1HQW, key_1JKW, value_1JKW, mask_11QK, **options)
            blocks.append(found)
        rows.append(torch.cat(blocks, dim=1))
    return torch.cat(rows)


AttentionInterface.register(HEAD_ATTENTION, masked_attention)
AttentionMaskInterface.register(HEAD_ATTENTION, sdpa_mask)
