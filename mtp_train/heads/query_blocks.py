"""Compute the attention of a training unroll for some queries at a time, in memory that is linear in a row's length.

Each block of queries has a mask of its own, built from document numbers, and reads the keys that one of them attends
to. The backward pass makes mask and keys again, and sums the gradients of all blocks in one tensor: what autograd
would keep of each block is together as large as the whole mask, and as all keys for every block.

Shapes: B rows, R rows of a block, T tokens, Q queries of a block, S keys, H heads, J key heads, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_train.heads.alignment import UnrollMask

BLOCK_QUERIES = 128
"""Queries of a block on a CPU, where the rows of a batch attend one after the other. torch's kernel computes the scores
that a mask removes, too: of packed documents and of an unroll (where a query attends to one key of each later depth)
these are most."""
SPREAD_QUERIES = 32
"""The same for start rows that are far apart: together they attend to nearly all keys of a row."""
DEVICE_QUERIES, WHOLE_TOKENS = 1024, 4096
"""Queries of a block on other devices, and the longest rows there that attend as a whole."""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""Query (R, H, Q, W), keys and values (R, J, S, W), bool mask (R, 1, Q, S) and attention sinks (H,) to the output (R,
Q, H, W)."""


class _Block(NamedTuple):
    """Queries that attend together."""

    rows: slice
    start: int
    end: int
    first: int
    """The first of the depth-1 keys."""
    last: int
    """The last of them + 1."""
    mask: UnrollMask
    """Of the block's rows."""

    def seen(self) -> Tensor:
        """Return the block's mask, (R, 1, Q, S)."""
        return self.mask.of(self.start, self.end, self.first, self.last)[:, None]

    def queries(self, whole_BHTW: Tensor) -> Tensor:
        return whole_BHTW[self.rows, :, self.start : self.end]

    def parts(self, whole_BJSW: Tensor) -> list[Tensor]:
        """Return views of the block's keys, one for each depth."""
        later = range(self.mask.document_BT.shape[1], whole_BJSW.shape[2], self.mask.num_queries)
        spans = [(self.first, self.last), *((own + self.start, own + self.end) for own in later)]
        return [whole_BJSW[self.rows, :, first:end] for first, end in spans]

    def keys(self, whole_BJSW: Tensor) -> Tensor:
        return torch.cat(self.parts(whole_BJSW), dim=2)

    def add(self, found_RJSW: Tensor, whole_BJSW: Tensor) -> None:
        """Add the gradient of the block's keys to that of all keys."""
        parts = self.parts(whole_BJSW)
        for part, own in zip(parts, found_RJSW.split([one.shape[2] for one in parts], dim=2), strict=True):
            part.add_(own)


def attend_in_blocks(
    attend: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: UnrollMask,
    sinks: Tensor | None,
    plain: float | None,
) -> Tensor:
    """Attend from the queries of an unroll. Shape (B, Q, H, W).

    Args:
        key, value: Those of the depth-1 rows, then those of each later depth's queries.
        plain: The scaling of attention that a kernel computes; None if only ``attend`` does.
    """
    device, (num_rows, _, num_queries, _) = query.device.type, query.shape
    on_cpu = device == "cpu"
    num_tokens = mask.document_BT.shape[1]
    if num_queries <= BLOCK_QUERIES if on_cpu else num_tokens <= WHOLE_TOKENS:
        return attend(query, key, value, mask.whole()[:, None], sinks)
    if torch.is_autocast_enabled(device):
        query, key, value = (one.to(torch.get_autocast_dtype(device)) for one in (query, key, value))
    size = DEVICE_QUERIES
    if on_cpu:
        size = BLOCK_QUERIES if mask.starts_BP is None else SPREAD_QUERIES
    blocks = []
    for rows in [slice(row, row + 1) for row in range(num_rows)] if on_cpu else [slice(None)]:
        starts_BP = None if mask.starts_BP is None else mask.starts_BP[rows]
        own = mask._replace(document_BT=mask.document_BT[rows], starts_BP=starts_BP)
        for start in range(0, num_queries, size):
            end = min(start + size, num_queries)
            # Other devices would have to be waited for.
            first, last = own.keys_of(start, end) if on_cpu else (0, num_tokens if starts_BP is not None else end)
            blocks.append(_Block(rows, start, end, first, last, own))
    return _Recomputed.apply(query, key, value, sinks, blocks, attend, plain if on_cpu else None)


class _Recomputed(torch.autograd.Function):
    """Attention that the backward pass computes a second time, on any device."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: list[_Block],
        attend: Attention,
        plain: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.blocks, ctx.attend, ctx.plain = blocks, attend, plain
        num_rows, num_heads, num_tokens, _ = query.shape
        output_BTHW = value.new_empty(num_rows, num_tokens, num_heads, value.shape[-1])
        for block in blocks:
            given = block.queries(query), block.keys(key), block.keys(value), block.seen(), sinks
            output_BTHW[block.rows, block.start : block.end] = attend(*given)
        return output_BTHW

    @staticmethod
    def backward(ctx: Any, grad_BTHW: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        gradients = tuple(map(torch.zeros_like, (query, key, value)))
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        for block in ctx.blocks:
            inputs = block.queries(query), block.keys(key), block.keys(value)
            grad = grad_BTHW[block.rows, block.start : block.end]
            if ctx.plain is None:
                found = _gradients(ctx.attend, grad, inputs, block.seen(), sinks)
            else:
                found = _product_gradients(grad.transpose(1, 2), inputs, block.seen(), ctx.plain)
            block.queries(gradients[0]).copy_(found[0])
            for own, whole in zip(found[1:3], gradients[1:], strict=True):
                block.add(own, whole)
            if of_sinks is not None:
                of_sinks += found[3]
        return *gradients, of_sinks, None, None, None


def _gradients(
    attend: Attention, grad: Tensor, inputs: Sequence[Tensor], seen: Tensor, sinks: Tensor | None
) -> Sequence[Tensor]:
    given = [one.detach().requires_grad_() for one in inputs]
    own = None if sinks is None else sinks.detach().requires_grad_()
    with torch.enable_grad():
        output = attend(given[0], given[1], given[2], seen, own)
    return torch.autograd.grad(output, given if own is None else [*given, own], grad)


def _product_gradients(grad: Tensor, inputs: Sequence[Tensor], seen: Tensor, scaling: float) -> list[Tensor]:
    """Compute the gradients in single products: on a CPU that is the faster way in bf16, and nearly as fast in fp32.

    Args:
        seen: bool, shape (1, 1, Q, S).
    """
    query, key, value = inputs
    # The heads that share a key are rows of one product.
    query_JPW, grad_JPW = (one.reshape(key.shape[1], -1, one.shape[-1]) for one in (query, grad))
    key_JSW = key[0]
    value_JSW = value[0]
    bias_1QS = torch.where(seen[0], 0.0, -torch.inf).to(query.dtype)
    group = query.shape[1] // key.shape[1]
    scores_JPS = torch.baddbmm(bias_1QS.repeat(1, group, 1), query_JPW, key_JSW.transpose(1, 2), alpha=scaling)
    with torch.enable_grad():
        scores_JPS.requires_grad_()
        weights_JPS = scores_JPS.softmax(dim=-1)
    (of_scores_JPS,) = torch.autograd.grad(weights_JPS, scores_JPS, grad_JPW @ value_JSW.transpose(1, 2))
    of_scores_JPS *= scaling
    return [
        (of_scores_JPS @ key_JSW).view(query.shape),
        (of_scores_JPS.transpose(1, 2) @ query_JPW)[None],
        (weights_JPS.detach().transpose(1, 2) @ grad_JPW)[None],
    ]
