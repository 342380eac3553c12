"""Compute which token each draft depth reads, which token it predicts, and which keys it attends to.

This module is the only place with that arithmetic. Depth k (counted from 1) of the draft that starts at row t reads
token t+k and predicts token t+k+1. Row t holds the trunk's hidden state after token t. For the row of tokens ``A B C D
E`` (t = 0..4)::

    start t   depth 1        depth 2        depth 3
    0 (A)     B -> C         C -> D         D -> E
    1 (B)     C -> D         D -> E         .
    2 (C)     D -> E         .              .
    3 (D)     .              .              .

A dot marks a depth without a target. The trunk's own prediction of the same target is at row t+k ("target row"): its
hidden state after token t+k gives p of token t+k+1.

Shapes: B rows, T tokens, K depths, Q query rows, S key rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PADDING_DOCUMENT = -1


def shift_left(values_BT: Tensor, num_tokens: int, fill: int) -> Tensor:
    """Shift every row ``num_tokens`` to the left, and put ``fill`` into the free places at the end.

    ``[a, b, c, d]`` shifted by 1 is ``[b, c, d, fill]``.
    """
    kept_BT = values_BT[:, num_tokens:]
    return torch.nn.functional.pad(kept_BT, (0, values_BT.shape[1] - kept_BT.shape[1]), value=fill)


def input_tokens(tokens_BT: Tensor, depth: int) -> Tensor:
    """Return the token that depth ``depth`` reads at each start row (0 past the end, where no target is valid)."""
    return shift_left(tokens_BT, depth, 0)


def valid_targets(document_BT: Tensor, loss_mask_BT: Tensor, depth: int) -> Tensor:
    """Return at which start rows depth ``depth`` has a target that counts in the loss.

    Args:
        document_BT: int, document number of each token, ``PADDING_DOCUMENT`` on padding.
        loss_mask_BT: bool, whether the token may be a target.

    Returns:
        bool, shape (B, T): the target is in the start's document, and its loss mask is set.
    """
    same_document_BT = shift_left(document_BT, depth + 1, PADDING_DOCUMENT) == document_BT
    wanted_BT = shift_left(loss_mask_BT.long(), depth + 1, 0).bool()
    return same_document_BT & wanted_BT & (document_BT != PADDING_DOCUMENT)


class UnrollMask(NamedTuple):
    """The attention mask of one depth of a recursive unroll, equal to what decoding computes.

    The keys are the depth-1 rows, then the depth-2 rows, and so on to ``depth``. The query of a draft that starts at
    row t attends to the depth-1 rows of its document up to t (built from true hidden states). Of each later depth it
    attends only to its own start's row.
    """

    document_BT: Tensor
    """int, document number of each row, ``PADDING_DOCUMENT`` on padding; the rows of a document are adjacent."""
    depth: int
    """1-based depth of the queries; row t has position t + depth - 1."""
    sliding_window: int | None = None
    """How many positions a query attends to, its own included; None for all."""

    def first_key(self, start: int) -> int:
        """Return the first depth-1 row to which a query at start row ``start`` or later attends, in any row."""
        numbers_BT = self.document_BT
        first = int((numbers_BT == numbers_BT[:, start, None]).any(0).int().argmax())
        if self.sliding_window is None:
            return first
        return min(start, max(first, start + self.depth - self.sliding_window))

    def of(self, start: int, end: int, first: int = 0) -> Tensor:
        """Return the mask of the queries of some start rows.

        Args:
            start, end: The start rows are those from ``start`` up to ``end``, exclusive.
            first: The first depth-1 row among the keys; the last is ``end - 1``.

        Returns:
            bool, shape (B, Q, S), True where a query attends to a key. The keys are the depth-1 rows, and for each
            later depth the rows of the queries.
        """
        device = self.document_BT.device
        rows_Q1, rows_S = torch.arange(start, end, device=device)[:, None], torch.arange(first, end, device=device)
        seen_QS = rows_S <= rows_Q1
        own_QQ = torch.eye(end - start, dtype=torch.bool, device=device)
        own = [own_QQ] * (self.depth - 1)
        if self.sliding_window is not None:
            seen_QS &= rows_S >= rows_Q1 + (self.depth - self.sliding_window)
            own = [own_QQ & (self.depth - earlier < self.sliding_window) for earlier in range(2, self.depth + 1)]
        number_BQ, number_BS = self.document_BT[:, start:end], self.document_BT[:, first:end]
        prefix_BQS = (number_BQ[:, :, None] == number_BS[:, None]) & seen_QS
        return torch.cat([prefix_BQS, *(one.expand(len(prefix_BQS), -1, -1) for one in own)], dim=-1)

    def whole(self) -> Tensor:
        """Return the mask of all queries: bool, shape (B, T, depth * T)."""
        return self.of(0, self.document_BT.shape[1])


def unroll_distances(mask_BTS: Tensor, depth: int) -> Tensor:
    """Return the distance from each query back to each key of an :class:`UnrollMask`, in positions.

    Args:
        mask_BTS: Its ``whole`` at ``depth``.

    Returns:
        int64, shape (B, T, depth * T), -1 where a query does not attend to a key.
    """
    rows_T = torch.arange(mask_BTS.shape[1], device=mask_BTS.device)
    apart_TT = rows_T[:, None] - rows_T
    # For depths above 1, a query attends only to the earlier draft positions of its own start token.
    distance_TS = torch.cat([apart_TT + (depth - own) for own in range(1, depth + 1)], dim=-1)
    return torch.where(mask_BTS, distance_TS, -1)
