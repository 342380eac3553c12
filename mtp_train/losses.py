"""Losses between the head's q and the trunk's p, through a frozen lm_head, without ever holding all logits.

The lm_head is frozen, so a loss only needs its gradient with respect to the head's hidden states. That gradient is
formed in the forward pass, a chunk of target rows at a time, and kept; backward scales it. Rows are chunked by target
position: one teacher product gives p for all K depths. Peak extra memory does not depend on the number of rows.

Shapes: K depths, N target rows, C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_train.losses_rows import LossKind as LossKind
from mtp_train.losses_rows import RowLoss, row_losses
from mtp_train.losses_rows import RowsIn as RowsIn

CHUNK_ROWS = 256


class LossTerms(NamedTuple):
    """The scalar to minimise and, for the log, each depth's own sum."""

    total: Tensor
    """Scalar fp32: sum over depths and rows of ``row_weight * loss``."""
    sum_K: Tensor
    """fp32, detached: sum of the unweighted loss over each depth's counted rows."""
    count_K: Tensor
    """fp32: number of each depth's counted rows, those whose weight is not 0 after ``on_policy`` left rows out."""


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


def chain_losses(tv_KN: Tensor, row_weight_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``e2e_tv``'s losses and what each row's ``tv`` counts in them.

    A draft is of use only if all before it were accepted. With depth k of start s accepted with probability
    ``1 - tv`` (at target row s + k), the chance that its first j drafts are all accepted is their product, and
    ``1 - product`` is the loss of depth j (arXiv:2606.12370: ``1 - 1/K sum_j prod_{i<=j} (1 - tv_i)`` is their mean).
    Depths without a target at a start are left out of its products.

    Args:
        tv_KN: Every row's ``tv``.
        row_weight_KN: 0 where depth k has no valid target at the row; else what its loss counts.

    Returns:
        The loss of each row, 0 where there is none, and the derivative of ``sum(row_weight * loss)`` with respect to
        each row's ``tv``. Both of shape (K, N).
    """
    num_depths = len(tv_KN)
    weight_KS, tv_KS = (to_starts(one) for one in (row_weight_KN, tv_KN))
    kept_KS = torch.where(weight_KS != 0, 1 - tv_KS, 1.0)
    loss_KS = torch.where(weight_KS != 0, 1 - kept_KS.cumprod(dim=0), 0.0)
    slope_KS = torch.zeros_like(kept_KS)
    for depth in range(num_depths):
        others_KS = kept_KS.clone()
        others_KS[depth] = 1.0
        slope_KS[depth] = (weight_KS * others_KS.cumprod(dim=0))[depth:].sum(dim=0)
    slope_KS = torch.where(weight_KS != 0, slope_KS, 0.0)
    return _to_targets(loss_KS), _to_targets(slope_KS)


def survivors(hit_KN: Tensor) -> Tensor:
    """Say which rows decoding from the head's own drafts would reach.

    Where depth k drafts greedily what the text says, depth k + 1 reads the same token whether it is told the text or
    the draft. Where it does not, the draft is rejected, nothing after it counts, and p after it is unknown. So to read
    the head's own drafts is to read the text and to leave out what comes after a wrong draft.

    Args:
        hit_KN: bool, whether the head's most probable token is the target, at target rows.

    Returns:
        bool, shape (K, N): all depths before it were hits at its start; True at depth 1.
    """
    hit_KS = to_starts(hit_KN)
    reached_KS = torch.ones_like(hit_KS)
    reached_KS[1:] = hit_KS[:-1].cumprod(dim=0).bool()
    return _to_targets(reached_KS)


def to_starts(aligned_KN: Tensor) -> Tensor:
    """Undo :func:`align_to_targets`, on sequences that may be flattened: what crosses their ends is no target.

    Args:
        aligned_KN: Depth k's row of start s at target row s + k.

    Returns:
        Shape (K, N), all depths of a start in one column.
    """
    return torch.stack([row_N.roll(-depth) for depth, row_N in enumerate(aligned_KN, start=1)])


def _to_targets(starts_KN: Tensor) -> Tensor:
    return torch.stack([row_N.roll(depth) for depth, row_N in enumerate(starts_KN, start=1)])


def row_work(
    rows_in: RowsIn, kind: LossKind, teacher_logits_CV: Tensor | None, temperature: float
) -> Callable[[Tensor, Tensor], RowLoss]:
    """Return what makes losses and gradients of a chunk's logits, one depth at a time, from these and the targets.

    It may write the gradient into the logits that it is given. The arguments are those of ``losses_rows.row_losses``;
    ``triton`` wants that package and a device it has kernels for.
    """
    if rows_in == "torch":
        return lambda logits_CV, targets_C: row_losses(kind, logits_CV, teacher_logits_CV, targets_C, temperature)
    # An optional dependency, which comes with torch for CUDA and with no other.
    from mtp_train.losses_triton import row_work as kernel_work

    return kernel_work(kind, teacher_logits_CV, temperature)


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
        on_policy: bool,
        rows_in: RowsIn,
        compute_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Once for all chunks. The matrix may be held in fp32 for a step in bf16, or in bf16 on a CPU that lacks it.
        compute_dtype = compute_dtype or lm_head_VD.dtype
        lm_head_VD = lm_head_VD.to(compute_dtype)
        own_heads = None if own_heads is None else [own_VD.to(compute_dtype) for own_VD in own_heads]
        gradient_KND = torch.zeros_like(student_KND)
        loss_KN = torch.zeros_like(row_weight_KN)
        hit_KN = torch.zeros_like(row_weight_KN, dtype=torch.bool)
        used_N = (row_weight_KN != 0).any(dim=0).nonzero().squeeze(1)
        with torch.autocast(student_KND.device.type, enabled=False):
            for rows_C in used_N.split(CHUNK_ROWS):
                teacher_CV = teacher_ND[rows_C].to(compute_dtype) @ lm_head_VD.T if kind != "ce" else None
                work = row_work(rows_in, kind, teacher_CV, temperature)
                for depth in range(len(student_KND)):
                    output_VD = lm_head_VD if own_heads is None else own_heads[depth]
                    logits_CV = student_KND[depth, rows_C].to(compute_dtype) @ output_VD.T
                    if on_policy:
                        hit_KN[depth, rows_C] = logits_CV.argmax(dim=-1) == targets_N[rows_C]
                    row = work(logits_CV, targets_N[rows_C])
                    loss_KN[depth, rows_C] = row.loss_C
                    step_CD = row.gradient_CV.to(compute_dtype) @ output_VD
                    gradient_KND[depth, rows_C] = step_CD.to(student_KND.dtype)
                    del logits_CV, row
        if on_policy:
            row_weight_KN = row_weight_KN * survivors(hit_KN)
        slope_KN = row_weight_KN
        if kind == "e2e_tv":
            loss_KN, slope_KN = chain_losses(loss_KN, row_weight_KN)
        gradient_KND *= slope_KN[..., None].to(gradient_KND.dtype)
        ctx.save_for_backward(gradient_KND)
        counted_KN = row_weight_KN != 0
        sum_K, count_K = (loss_KN * counted_KN).sum(dim=1), counted_KN.sum(dim=1).float()
        ctx.mark_non_differentiable(sum_K, count_K)
        return (row_weight_KN * loss_KN).sum(), sum_K, count_K

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_grads_K: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_KND,) = ctx.saved_tensors
        return gradient_KND * grad_total, *[None] * 10


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
    on_policy: bool = False,
    rows_in: RowsIn = "torch",
    compute_dtype: torch.dtype | None = None,
) -> LossTerms:
    """Return the weighted loss of all depths, rows chunked by target position.

    Args:
        student_KND: The head's states for the logits, aligned to target rows (``align_to_targets``).
        teacher_ND: The trunk's hidden states at the same target rows.
        lm_head_VD: The frozen output matrix.
        targets_N: int64, the token each target row is followed by.
        row_weight_KN: fp32, 0 where depth k has no valid target at the row.
        kind: See ``losses_rows.py``; ``e2e_tv``: :func:`chain_losses`.
        temperature: Softens both p and q of every loss but ``ce``.
        own_heads: Each depth's own output matrix, frozen, where the head does not share the trunk's.
        on_policy: Rows past a wrong draft of their start lose nothing, see :func:`survivors`.
        rows_in: See :func:`row_work`.
        compute_dtype: What logits and their gradients are multiplied in; softmax and losses are in fp32. An output
            matrix held in another dtype is converted once for all rows. None for the matrix's own dtype.
    """
    total, sum_K, count_K = _FrozenHeadLoss.apply(
        student_KND,
        teacher_ND.detach(),
        lm_head_VD.detach(),
        own_heads,
        targets_N,
        row_weight_KN,
        kind,
        temperature,
        on_policy,
        rows_in,
        compute_dtype,
    )
    return LossTerms(total, sum_K, count_K)
