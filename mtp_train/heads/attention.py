"""The attention function that heads and the decoder put in the place of transformers' own.

It takes boolean masks whatever the model, and what some models add to plain attention: a learned logit that draws
attention to nothing ("sink"), scores bounded by a tanh, and keys chosen beforehand by an indexer (sparse attention).

Shapes: B rows, T queries, S keys, H heads, K chosen keys.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtp_train.heads.flex import SeenRows, attend_to_seen

HEAD_ATTENTION = "mtp_masked"


def masked_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa`` does (hence the arguments), with sinks and chosen keys.

    Args:
        module: The attention layer.
        query: Shape (B, H, T, width).
        key: Shape (B, key heads, S, width).
        value: As ``key``, of its own width.
        attention_mask: bool, broadcast to (B, 1, T, S), True where a query sees a key; None is plain causal attention.
            Of layers that see how far away keys are, int64 in a cache of ours: the distance, -1 where it is not seen.
        s_aux: Shape (H,), each head's sink.
        softcap: The c of ``c tanh(scores / c)`` (Gemma 2, arXiv:2408.00118, section 2); None for no bound.
        position_bias: Added to the scores, (B, H, T, S); by distance, (B, H, T, E), where the mask says distances.
        indices: int, shape (B, T, K), the keys that each query may see; None for all.
        block_indices: The blocks of keys that each query may see, as the layer's own indexer keeps them; None for all.
        **options: What ``sdpa`` takes.

    Returns:
        Shape (B, T, H, width), and None for the weights.
    """
    if attention_mask is None and any(one is not None for one in (s_aux, softcap, indices, block_indices)):
        attention_mask = _causal(query.shape[2], key.shape[2], key.device)
    if attention_mask is not None and indices is not None:
        chosen_BTS = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        attention_mask = attention_mask & chosen_BTS.scatter(-1, indices.long(), True)[:, None]
    if block_indices is not None:
        indexer = cast(Any, module.indexer)
        attention_mask = indexer.build_block_mask(
            block_indices, attention_mask, key.shape[2], query.dtype, query.device, options["position_ids"]
        )
    if attention_mask is not None and softcap is not None:
        return _attend_bounded(query, key, value, attention_mask, softcap, float(options["scaling"])), None
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        profiles = cast(Any, module).rel_logits_proj
        query, attention_mask = profiles.at_distances(query, position_bias, attention_mask)
    elif position_bias is not None:
        options["position_bias"] = position_bias
    if attention_mask is not None and s_aux is not None:
        # One more key: it scores the sink whatever the query, and has nothing to say.
        bias = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
        sink_B1T1 = s_aux.to(query.dtype)[None, :, None, None].expand(query.shape[0], -1, query.shape[2], 1)
        attention_mask = torch.cat([bias.expand(*sink_B1T1.shape[:3], -1), sink_B1T1], dim=-1)
        key, value = (torch.nn.functional.pad(one, (0, 0, 0, 1)) for one in (key, value))
    if attention_mask is not None and 1 < attention_mask.shape[1] < query.shape[1]:
        return _attend_in_groups(module, query, key, value, attention_mask, **options)
    attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return attended


def _attend_bounded(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, softcap: float, scaling: float
) -> Tensor:
    """Attend with bounded scores, which torch's fused attention knows nothing of. Shape (B, T, H, width)."""
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    scores_BHTS = softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / softcap)
    # Not infinity: rows of padding see nothing.
    scores_BHTS = scores_BHTS.masked_fill(~attention_mask, torch.finfo(scores_BHTS.dtype).min)
    weights_BHTS = scores_BHTS.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights_BHTS @ value).transpose(1, 2).contiguous()


def _attend_in_groups(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attend with a mask for each group of heads, (B, groups, T, S), as if the groups were more rows.

    A mask for each head would be larger than all else there is.
    """
    num_rows, groups = attention_mask.shape[:2]
    query, key, value = (one.reshape(num_rows * groups, -1, *one.shape[2:]) for one in (query, key, value))
    grouped, _ = sdpa_attention_forward(module, query, key, value, attention_mask.flatten(0, 1)[:, None], **options)
    return grouped.unflatten(0, (num_rows, groups)).transpose(1, 2).flatten(2, 3), None


def _causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)[None, None]


def head_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SeenRows | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as :func:`masked_attention`, or to the rows seen in an unroll without masks."""
    if not isinstance(attention_mask, SeenRows):
        return masked_attention(module, query, key, value, attention_mask, **options)
    scaling, softcap, sinks_H = float(options["scaling"]), options.get("softcap"), options.get("s_aux")
    return attend_to_seen(query, key, value, attention_mask, scaling=scaling, softcap=softcap, sinks_H=sinks_H), None


AttentionInterface.register(HEAD_ATTENTION, head_attention)
AttentionMaskInterface.register(HEAD_ATTENTION, sdpa_mask)
