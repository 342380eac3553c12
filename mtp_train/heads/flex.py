"""Compute the attention of an unroll with torch's flex_attention (arXiv:2412.05496), without dense masks.

The keys of depth k of a recursive unroll are the rows of depth 1, then the rows of depth 2, and so on. A query attends
to an interval of depth-1 rows that ends with its own row, and in the later depths to the rows of its own start alone.
flex_attention covers depth 1, with a block mask that is the same at every depth, and returns the log-sum-exp of its
scores. The few scores of a start's own rows are computed elementwise and combined with it, as the parts of an online
softmax are (arXiv:1805.02867). No tensor here has the size of rows x keys.

torch compiles flex_attention into a GPU kernel: one for all depths of a shape (B, T), and another for forwards without
gradients. Compiling more than ``torch._dynamo.config.recompile_limit`` (8) of them is an error, so callers use few
shapes: a run measures in the shape that it trains in.

No GPU has run this code yet. Tests on a CPU compare the graph that the compiler traces, forward and backward, with
dense masks. Speed and memory on a GPU are not measured.

Shapes: B rows, T tokens, N blocks of queries, M blocks of keys, R rows of a block, H heads, J key heads, G heads that
share one key head, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import PretrainedConfig

from mtp_train.errors import RecipeError
from mtp_train.families import Family
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.heads.autocast import autocast_dtype

Attention = Literal["dense", "flex"]

BLOCK = 128
"""Rows of a block: torch's default, which its kernels divide further."""
_DEVICES = ("cuda", "xpu")
# At a width of 512, the kernel that torch 2.11 generates needs 256 KiB of shared memory. A block has 227 KiB on an
# H100.
_MOST_WIDTH = 256


class SeenRows(NamedTuple):
    """The rows that each query of an unroll attends to, in place of a dense mask."""

    blocks: BlockMask
    """The block mask over the rows of depth 1."""
    num_own: int
    """How many of the last rows of its own start a query attends to, its own row included; 0 at depth 1."""


def require_flex_device(attention: Attention, device: torch.device) -> None:
    """Check that the device can train with the attention that the recipe selects.

    Raises:
        RecipeError: It cannot.
    """
    if attention == "flex" and device.type not in _DEVICES:
        raise RecipeError(
            [
                f"train.attention: 'flex' on {device.type}, where torch has no backward pass of flex_attention; "
                f"expected one of {', '.join(_DEVICES)}. Write train.attention: dense."
            ]
        )


def why_dense(family: Family, layer_config: PretrainedConfig) -> str | None:
    """Return why the layers of a head need dense masks, as a clause for messages; None where flex_attention works.

    Args:
        family: The head's record.
        layer_config: The config that its layers are built from.
    """
    if family.layer.masks_of_distances:
        return "whose layers depend on the distance to each key"
    if family.classes.frozen is not None:
        return "whose layers choose the keys that a query attends to"
    config = layer_config.to_dict()
    width, dropout = config.get("head_dim"), config.get("attention_dropout")
    if width is not None and width > _MOST_WIDTH:
        return f"whose heads are {width} wide, too wide for torch's kernel ({_MOST_WIDTH} at most)"
    return f"whose config sets attention_dropout: {dropout}" if dropout else None


def flex_masks(document_BT: Tensor) -> Callable[[int, int | None], SeenRows]:
    """Return a function from depth and sliding window to the rows that the queries of that depth attend to.

    It is equivalent to ``unroll_mask``, except that a row of padding attends to itself alone: its result is never used,
    and the kernel skips its blocks.

    Args:
        document_BT: int, document numbers, each document contiguous; ``PADDING_DOCUMENT`` on padding.
    """
    rows_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    alone_BT = begins_BT | (document_BT == PADDING_DOCUMENT)
    first_BT = torch.where(alone_BT, rows_T, 0).cummax(dim=1).values
    made: dict[int | None, BlockMask] = {}

    def seen(depth: int, sliding_window: int | None) -> SeenRows:
        # Row t of the depth has position t + depth - 1.
        back = None if sliding_window is None else sliding_window - depth
        if back not in made:
            made[back] = interval_blocks(first_BT if back is None else first_BT.maximum(rows_T - back))
        return SeenRows(made[back], depth - 1 if sliding_window is None else min(depth - 1, sliding_window))

    return seen


def interval_blocks(first_BT: Tensor) -> BlockMask:
    """Return the block mask in which row t attends to the rows ``first[t]`` to t, and to none where ``first[t]`` > t.

    ``create_block_mask`` would evaluate every row and key. The ends of an interval determine which blocks it touches
    and which it fills.

    Args:
        first_BT: int, on any device.
    """
    num_rows = first_BT.shape[1]
    first_BT = first_BT.int()

    def seen(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first_BT[batch, query])

    # Rows past the end attend to nothing: a block that contains one is never full.
    padded_BT = torch.nn.functional.pad(first_BT, (0, -num_rows % BLOCK), value=num_rows)
    first_BNR = padded_BT.unflatten(1, (-1, BLOCK))
    blocks_M = torch.arange(first_BNR.shape[1], device=first_BT.device)
    begin_M, blocks_N1 = blocks_M * BLOCK, blocks_M[:, None]
    touched_BNM = (begin_M + BLOCK > first_BNR.amin(-1, keepdim=True)) & (blocks_M <= blocks_N1)
    full_BNM = (begin_M >= first_BNR.amax(-1, keepdim=True)) & (blocks_M < blocks_N1)
    return BlockMask.from_kv_blocks(
        *_listed(touched_BNM & ~full_BNM),
        *_listed(full_BNM),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(num_rows, num_rows),
    )


def _listed(chosen_BNM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen key blocks of each query block in the format of ``BlockMask``, the same for all heads.

    Returns:
        The number of chosen blocks, and the numbers of all blocks with the chosen ones first.
    """
    order_BNM = chosen_BNM.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BNM.sum(-1, dtype=torch.int32)[:, None], order_BNM.int()[:, None]


@cache
def _compiled() -> Callable[..., Any]:
    # fullgraph: after a graph break, torch would compute all scores at once instead of failing. Not dynamic: a kernel
    # for all shapes is slower, and each shape is used many times.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors in autocast's dtype, as flex_attention rejects mixed dtypes and does not cast."""
    dtype = autocast_dtype(query.device)
    if dtype is None:
        return query, key, value
    return query.to(dtype), key.to(dtype), value.to(dtype)


def attend_to_seen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: SeenRows,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend to the rows of a :class:`SeenRows`.

    Args:
        query: Shape (B, H, T, W).
        key: Shape (B, J, depths * T, W): the rows of depth 1 first, the rows of the queries' own depth last.
        value: As ``key``, with a width of its own.
        seen: The result of :func:`flex_masks` for the depth.
        scaling: The factor of the scores.
        softcap: See :func:`mtp_train.heads.attention.masked_attention`.
        sinks_H: ``s_aux`` of the same function.

    Returns:
        Shape (B, T, H, width of values), in the queries' dtype.
    """
    query, key, value = _alike(query, key, value)
    num_rows, num_groups = query.shape[2], key.shape[1]

    def bounded(score: Tensor, *_place: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    # Copies have the same strides at every depth, so the kernel is compiled once. contiguous() would keep a slice that
    # is contiguous already, with other strides.
    attended, aux = _compiled()(
        query,
        key[:, :, :num_rows].clone(memory_format=torch.contiguous_format),
        value[:, :, :num_rows].clone(memory_format=torch.contiguous_format),
        score_mod=None if softcap is None else bounded,
        block_mask=seen.blocks,
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    if seen.num_own == 0 and sinks_H is None:
        return attended.transpose(1, 2).contiguous()
    own_keys, own_values = (
        [rows[:, :, None].float() for rows in one.split(num_rows, dim=2)[-1 : -1 - seen.num_own : -1]]
        for one in (key, value)
    )
    query_BJGTW = query.unflatten(1, (num_groups, -1)).float()
    lse_BJGT = aux.lse.unflatten(1, (num_groups, -1))
    scores = [lse_BJGT, *(bounded((query_BJGTW * own_BJ1TW).sum(-1) * scaling) for own_BJ1TW in own_keys)]
    if sinks_H is not None:
        scores.append(sinks_H.float().unflatten(0, (num_groups, -1))[None, :, :, None].expand_as(lse_BJGT))
    weights = torch.stack(scores).softmax(0).unsqueeze(-1)
    parts = [attended.unflatten(1, (num_groups, -1)).float(), *own_values]
    # An attention sink adds to the softmax denominator but has no value vector.
    joined_BJGTW = sum(weight * part for weight, part in zip(weights, parts, strict=False))
    return joined_BJGTW.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()
