"""What each depth would have drafted at every target of some rows, by row and summed: teacher-forced acceptance.

Shapes: K depths, N target rows, C rows of a chunk, V vocabulary, R drafted vocabulary.
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


class TargetFigures(NamedTuple):
    """What is known of every target row; 0 where no depth has a target."""

    agreed_KN: Tensor
    """bool, whether argmax q = argmax p."""
    overlap_KN: Tensor
    """fp32, ``sum_v min(p, q)``."""
    entropy_N: Tensor
    """fp32, of p, nats."""


class DenseSums(NamedTuple):
    """Sums over targets; all fp32 of shape (K,) but the entropy. They add up over batches and processes."""

    agreed_K: Tensor
    """Targets where argmax q = argmax p."""
    overlapped_K: Tensor
    """``sum_v min(p, q)``."""
    chained_K: Tensor
    """Drafts of :attr:`reached_K` where this depth and all before it agreed: those that greedy decoding accepts."""
    chained_overlap_K: Tensor
    """The product of this depth's overlap and those before it, of the same drafts: what sampling accepts there."""
    reached_K: Tensor
    """Drafts that decoding can meet: the round begins after a token of the response, and no depth before lacks a
    target. A round that begins inside the prompt is none: the first token comes from prefill."""
    targets_K: Tensor
    entropy: Tensor
    """Of p at depth 1's targets, nats, a scalar."""

    def plus(self, other: DenseSums) -> DenseSums:
        """Return both together."""
        return DenseSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def target_figures(
    rows: AlignedRows, trunk: Trunk, head: MtpHead, *, temperature: float = 1.0, draft_vocab_R: Tensor | None = None
) -> TargetFigures:
    """Look at all targets of some rows. Holds p and q of a chunk of rows at a time.

    Args:
        rows: Of trunk and head.
        trunk: Its output matrix makes p, and q where the head has none of its own.
        head: The head.
        temperature: Divides the logits of p and q; above 0.
        draft_vocab_R: int, the tokens that the head may draft: q is 0 elsewhere. None for all.
    """
    valid_KN = rows.valid_KN
    agreed_KN = torch.zeros_like(valid_KN)
    overlap_KN = torch.zeros(valid_KN.shape, device=valid_KN.device)
    entropy_N = torch.zeros(valid_KN.shape[1], device=valid_KN.device)
    # Stored in fewer bytes, and on no device in particular.
    vocab_R = None if draft_vocab_R is None else draft_vocab_R.to(valid_KN.device, torch.long)
    for chunk in valid_KN.any(dim=0).nonzero().squeeze(1).split(CHUNK_ROWS):
        p_CV = _softmax(trunk.project(rows.teacher_ND[chunk]), temperature)
        entropy_N[chunk] = entropy(p_CV)
        for depth in range(len(valid_KN)):
            # Whatever dtype p's states are in, an output matrix multiplies it.
            state_CD = rows.student_KND[depth, chunk].to(rows.teacher_ND.dtype)
            logits_CV = head.module_for(depth + 1).project(state_CD, trunk.project)
            if vocab_R is not None:
                kept_CV = torch.full_like(logits_CV, -torch.inf)
                logits_CV = kept_CV.index_copy_(1, vocab_R, logits_CV[:, vocab_R])
            q_CV = _softmax(logits_CV, temperature)
            agreed_KN[depth, chunk] = q_CV.argmax(-1) == p_CV.argmax(-1)
            overlap_KN[depth, chunk] = overlap(p_CV, q_CV)
    return TargetFigures(agreed_KN, overlap_KN, entropy_N)


def dense_sums(rows: AlignedRows, trunk: Trunk, head: MtpHead) -> DenseSums:
    """Sum what :func:`target_figures` finds at temperature 1."""
    return sum_figures(rows, target_figures(rows, trunk, head))


def sum_figures(rows: AlignedRows, figures: TargetFigures) -> DenseSums:
    """Sum figures over the targets of the rows."""
    valid_KN = rows.valid_KN
    agreed_KN, overlap_KN, entropy_N = figures
    valid_KS, agreed_KS, overlap_KS = (to_starts(one) for one in (valid_KN, agreed_KN, overlap_KN))
    reached_KS = valid_KS.cumprod(0) * rows.starts_N
    return DenseSums(
        agreed_K=(agreed_KN & valid_KN).sum(1).float(),
        overlapped_K=(overlap_KN * valid_KN).sum(1),
        chained_K=(agreed_KS.cumprod(0) * reached_KS).sum(1).float(),
        chained_overlap_K=(overlap_KS.cumprod(0) * reached_KS).sum(1),
        reached_K=reached_KS.sum(1).float(),
        targets_K=valid_KN.sum(1).float(),
        entropy=entropy_N[valid_KN[0]].sum(),
    )


def _softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    # Undivided at temperature 1: a copy of a chunk's logits is a quarter of a gigabyte.
    logits_CV = logits_CV.float()
    return torch.softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)
