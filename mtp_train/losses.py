"""Losses between the head's q and the trunk's p, through a frozen lm_head, without ever holding all logits.

The lm_head is frozen, so a loss only needs its gradient with respect to the head's hidden states. That gradient is
formed in the forward pass, a chunk of target rows at a time, and kept; backward scales it. Rows are chunked by target
position: one teacher product gives p for all K depths. Peak extra memory does not depend on the number of rows.

Shapes: K depths, N target rows, C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

LossKind = Literal["ce", "kl"]
CHUNK_ROWS = 256


class LossTerms(NamedTuple):
    """The scalar to minimise and, for the log, each depth's own sum."""

    total: Tensor
    """Scalar fp32: sum over depths and rows of ``row_weight * loss``."""
    sum_K: Tensor
    """fp32, detached: sum of the unweighted loss over each depth's rows whose weight is not 0."""


def depth_weights(num_depths: int, decay: float) -> list[float]:
    """Return weights proportional to ``decay ** (k - 1)`` that sum to 1 (FastMTP, arXiv:2509.18362, equation 2)."""
    raw = [decay**index for index in range(num_depths)]
    return [value / sum(raw) for value in raw]


def align_to_targets(starts: Sequence[Tensor]) -> Tensor:
    """Move depth k's rows from start row t to target row t+k, so that all depths of a target share a row.

    Args:
        starts: Depth k at index k-1, each of shape (B, T, ...): B sequences of T start rows.

    Returns:
        Shape (K, B, T, ...); the first k rows of depth k are 0 (no start that early).
    """
    moved = []
    for depth, rows in enumerate(starts, start=1):
        empty = rows.new_zeros(rows.shape[0], min(depth, rows.shape[1]), *rows.shape[2:])
        moved.append(torch.cat([empty, rows[:, : max(0, rows.shape[1] - depth)]], dim=1))
    return torch.stack(moved)


def chunk_loss_and_gradient(
    logits_CV: Tensor, teacher_logits_CV: Tensor | None, targets_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return each row's loss and its gradient with respect to the logits, both fp32.

    Without teacher logits it is ``ce``, ``-log q(x)``; with them ``kl``, ``temperature^2 * KL(p_T || q_T)`` with both
    softened by the temperature (Hinton et al., arXiv:1503.02531, section 2.1): the factor keeps the gradient's size
    comparable across temperatures.
    """
    if teacher_logits_CV is None:
        log_q_CV = torch.log_softmax(logits_CV.float(), dim=-1)
        loss_C = -log_q_CV.gather(1, targets_C[:, None]).squeeze(1)
        gradient_CV = log_q_CV.exp_()
        gradient_CV.scatter_add_(1, targets_C[:, None], gradient_CV.new_full((len(targets_C), 1), -1.0))
        return loss_C, gradient_CV
    log_q_CV = torch.log_softmax(logits_CV.float() / temperature, dim=-1)
    log_p_CV = torch.log_softmax(teacher_logits_CV.float() / temperature, dim=-1)
    p_CV = log_p_CV.exp()
    # In place from here on: each further tensor of this shape would be held at the peak.
    loss_C = temperature**2 * torch.linalg.vecdot(p_CV, log_p_CV.sub_(log_q_CV))
    return loss_C, log_q_CV.exp_().sub_(p_CV).mul_(temperature)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_KND: Tensor,
        teacher_ND: Tensor,
        lm_head_VD: Tensor,
        own_heads: Sequence[Tensor] | None,
        targets_N: Tensor,
        row_weight_KN: Tensor,
        kind: LossKind,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        gradient_KND = torch.zeros_like(student_KND)
        total = torch.zeros((), dtype=torch.float32, device=student_KND.device)
        sum_K = torch.zeros(len(student_KND), dtype=torch.float32, device=student_KND.device)
        used_N = (row_weight_KN != 0).any(dim=0).nonzero().squeeze(1)
        with torch.autocast(student_KND.device.type, enabled=False):
            for rows_C in used_N.split(CHUNK_ROWS):
                teacher_CV = teacher_ND[rows_C].to(lm_head_VD.dtype) @ lm_head_VD.T if kind != "ce" else None
                for depth in range(len(student_KND)):
                    weight_C = row_weight_KN[depth, rows_C]
                    output_VD = lm_head_VD if own_heads is None else own_heads[depth]
                    logits_CV = student_KND[depth, rows_C].to(output_VD.dtype) @ output_VD.T
                    loss_C, gradient_CV = chunk_loss_and_gradient(logits_CV, teacher_CV, targets_N[rows_C], temperature)
                    total += (weight_C * loss_C).sum()
                    sum_K[depth] += loss_C[weight_C != 0].sum()
                    gradient_CV *= weight_C[:, None]
                    gradient_KND[depth, rows_C] = (gradient_CV.to(output_VD.dtype) @ output_VD).to(student_KND.dtype)
                    del logits_CV, gradient_CV
        ctx.save_for_backward(gradient_KND)
        ctx.mark_non_differentiable(sum_K)
        return total, sum_K

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _grad_sum_K: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_KND,) = ctx.saved_tensors
        return gradient_KND * grad_total, None, None, None, None, None, None, None


def frozen_head_loss(
    student_KND: Tensor,
    teacher_ND: Tensor,
    lm_head_VD: Tensor,
    targets_N: Tensor,
    row_weight_KN: Tensor,
    *,
    kind: LossKind,
    temperature: float = 1.0,
    own_heads: Sequence[Tensor] | None = None,
) -> LossTerms:
    """Return the weighted loss of all depths, rows chunked by target position.

    Args:
        student_KND: The head's states for the logits, aligned to target rows (``align_to_targets``).
        teacher_ND: The trunk's hidden states at the same target rows.
        lm_head_VD: The frozen output matrix.
        targets_N: int64, the token each target row is followed by.
        row_weight_KN: fp32, 0 where depth k has no valid target at the row.
        kind: ``ce`` (hard targets) or ``kl`` (the trunk's own distribution).
        temperature: Softens both p and q in ``kl``.
        own_heads: Each depth's own output matrix, frozen, where the head does not share the trunk's.
    """
    total, sum_K = _FrozenHeadLoss.apply(
        student_KND, teacher_ND.detach(), lm_head_VD.detach(), own_heads, targets_N, row_weight_KN, kind, temperature
    )
    return LossTerms(total, sum_K)
