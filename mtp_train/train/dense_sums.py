"""What each depth would have drafted at every target of some rows, summed: what teacher-forced acceptance is made of.

Shapes: K depths, N target rows, C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mtp_train.acceptance import entropy, overlap
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.losses import CHUNK_ROWS, to_starts

if TYPE_CHECKING:
    from mtp_train.train.module import AlignedRows


class DenseSums(NamedTuple):
    """Sums over targets; all fp32 of shape (K,) but the entropy. They add up over batches and processes."""

    agreed_K: Tensor
    """Targets where argmax q = argmax p."""
    overlapped_K: Tensor
    """``sum_v min(p, q)``."""
    chained_K: Tensor
    """Targets where this depth and all before it, from the same start, agreed: those that greedy decoding accepts."""
    chained_overlap_K: Tensor
    """The product of this depth's overlap and those before it, from the same start: what sampling accepts there."""
    targets_K: Tensor
    entropy: Tensor
    """Of p at depth 1's targets, nats, a scalar."""

    def plus(self, other: DenseSums) -> DenseSums:
        """Return both together."""
        return DenseSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def dense_sums(rows: AlignedRows, trunk: Trunk, head: MtpHead) -> DenseSums:
    """Look at all targets of some rows. Holds p and q of a chunk of rows at a time.

    Args:
        rows: Of trunk and head.
        trunk: Its output matrix makes p, and q where the head has none of its own.
        head: The head.
    """
    valid_KN = rows.valid_KN
    hit_KN = torch.zeros_like(valid_KN)
    overlap_KN = torch.zeros(valid_KN.shape, device=valid_KN.device)
    entropy_sum = torch.zeros((), device=valid_KN.device)
    for chunk in valid_KN.any(dim=0).nonzero().squeeze(1).split(CHUNK_ROWS):
        p_CV = torch.softmax(trunk.project(rows.teacher_ND[chunk]).float(), dim=-1)
        entropy_sum += entropy(p_CV)[valid_KN[0, chunk]].sum()
        for depth in range(len(valid_KN)):
            state_CD = rows.student_KND[depth, chunk].to(trunk.lm_head_VD.dtype)
            q_CV = torch.softmax(head.module_for(depth + 1).project(state_CD, trunk.project).float(), dim=-1)
            hit_KN[depth, chunk] = q_CV.argmax(-1) == p_CV.argmax(-1)
            overlap_KN[depth, chunk] = overlap(p_CV, q_CV)
    valid_KS, hit_KS, overlap_KS = (to_starts(one) for one in (valid_KN, hit_KN, overlap_KN))
    return DenseSums(
        agreed_K=(hit_KN & valid_KN).sum(1).float(),
        overlapped_K=(overlap_KN * valid_KN).sum(1),
        chained_K=(hit_KS.cumprod(0) * valid_KS).sum(1).float(),
        chained_overlap_K=(overlap_KS.cumprod(0) * valid_KS).sum(1),
        targets_K=valid_KN.sum(1).float(),
        entropy=entropy_sum,
    )
