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

Shapes: B rows, T tokens, K depths, Q query rows, S key rows, P start rows of each row.
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


def valid_depths(
    document_BT: Tensor, loss_mask_BT: Tensor, num_depths: int, starts_BP: Tensor | None = None
) -> list[Tensor]:
    """Return :func:`valid_targets` of every depth at some start rows: K tensors (B, P).

    Args:
        starts_BP: int, the start rows, -1 for none; None for all.
    """
    valid = [valid_targets(document_BT, loss_mask_BT, depth) for depth in range(1, num_depths + 1)]
    if starts_BP is None:
        return valid
    return [at_starts(one_BT, starts_BP.clamp(min=0)) & (starts_BP >= 0) for one_BT in valid]


def at_starts(values_BT: Tensor, starts_BP: Tensor | None) -> Tensor:
    """Return the values of some start rows, (B, P, ...); all of (B, T, ...) for None."""
    if starts_BP is None:
        return values_BT
    return values_BT.take_along_dim(starts_BP.reshape(*starts_BP.shape, *[1] * (values_BT.ndim - 2)), dim=1)


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
    starts_BP: Tensor | None = None
    """int, ascending in each row: the start row of each query; None if every row is one."""

    @property
    def num_queries(self) -> int:
        return (self.document_BT if self.starts_BP is None else self.starts_BP).shape[1]

    def _starts(self, start: int, end: int) -> Tensor:
        """Return the start rows of some queries, (B, Q)."""
        if self.starts_BP is not None:
            return self.starts_BP[:, start:end]
        return torch.arange(start, end, device=self.document_BT.device).expand(len(self.document_BT), -1)

    def keys_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the first depth-1 row to which a query from ``start`` up to ``end`` attends, and the last one + 1."""
        numbers_BT = self.document_BT
        starts_BQ = self._starts(start, end)
        first = int((numbers_BT == numbers_BT.gather(1, starts_BQ[:, :1])).any(0).int().argmax())
        if self.sliding_window is not None:
            least = int(starts_BQ.min())
            first = min(least, max(first, least + self.depth - self.sliding_window))
        return first, int(starts_BQ.max()) + 1

    def of(self, start: int, end: int, first: int, last: int) -> Tensor:
        """Return the mask of some queries.

        Args:
            start, end: The queries are those from ``start`` up to ``end``, exclusive.
            first, last: The depth-1 rows among the keys, ``last`` exclusive.

        Returns:
            bool, shape (B, Q, S), True where a query attends to a key. The keys are the depth-1 rows, and for each
            later depth the rows of the queries.
        """
        device = self.document_BT.device
        starts_BQ = self._starts(start, end)
        rows_S = torch.arange(first, last, device=device)
        number_BQ = self.document_BT.gather(1, starts_BQ)
        prefix_BQS = (number_BQ[:, :, None] == self.document_BT[:, None, first:last]) & (rows_S <= starts_BQ[..., None])
        own_QQ = torch.eye(end - start, dtype=torch.bool, device=device)
        own = [own_QQ] * (self.depth - 1)
        if self.sliding_window is not None:
            prefix_BQS &= rows_S >= starts_BQ[..., None] + (self.depth - self.sliding_window)
            own = [own_QQ & (self.depth - earlier < self.sliding_window) for earlier in range(2, self.depth + 1)]
        return torch.cat([prefix_BQS, *(one.expand(len(prefix_BQS), -1, -1) for one in own)], dim=-1)

    def whole(self) -> Tensor:
        """Return the mask of all queries: bool, shape (B, Q, T + (depth - 1) * Q)."""
        return self.of(0, self.num_queries, 0, self.document_BT.shape[1])


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
