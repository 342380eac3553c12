"""Compute losses between the head's q and the trunk's p through a frozen lm_head, without holding all logits at once.

The lm_head is frozen, so a loss needs its gradient only with respect to the head's hidden states. The forward pass
computes and keeps that gradient, one chunk of target rows at a time; backward scales it. Rows are chunked by target
position: one product of the trunk's hidden states with the lm_head gives p for all K depths. Peak extra memory does not
depend on the number of rows.

Shapes: K depths, N target rows, C rows of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtp_train.losses.catalogue import Loss, RowLoss, find_loss, resolved
from mtp_train.upstream.compiled import fused

if TYPE_CHECKING:
    from mtp_train.losses.catalogue import RowsFn, RowWork

CHUNK_ROWS = 256
"""Target rows of one chunk on a CPU, and the fewest on a GPU, see :func:`chunk_rows`."""
MOST_CHUNK_ROWS, _ROWS_UNIT = 4096, 128
LOSS_BYTES, _MEMORY_PARTS = 2 * 10**9, 32
"""Most bytes of a chunk's tensors on a GPU, and the part of its memory that they may take: one of so many. The fewest
rows may take more."""
BLOCK_NUMBERS = 2**18
"""Logits of one block of rows on a CPU: 1 MiB in fp32, for the few tensors of a block to stay in the cache."""
CHUNK_TENSORS = 5
"""Largest number of fp32 tensors of shape (C, V) that the losses of ``losses/catalogue.py`` hold at once: p, the head's
logits, q, the gradient, and the products that ``torch.linalg.vecdot`` sums. ``kl`` holds four."""
LOGIT_BYTES = CHUNK_TENSORS * 4
"""Most bytes that the tensors of a chunk take for each of its rows and each token of the vocabulary."""


def chunk_rows(vocab_size: int, gpu_bytes: int | None) -> int:
    """Return the number of target rows of one chunk.

    A product of few rows reads the output matrix without filling a GPU: on an H100 it is bound by operations from about
    300 rows on. A CPU works on a few rows at a time, and its chunks stay small.

    Args:
        gpu_bytes: Memory of the GPU; None for any other device.
    """
    if gpu_bytes is None:
        return CHUNK_ROWS
    rows = min(LOSS_BYTES, gpu_bytes // _MEMORY_PARTS) // (vocab_size * LOGIT_BYTES)
    return max(CHUNK_ROWS, min(MOST_CHUNK_ROWS, rows // _ROWS_UNIT * _ROWS_UNIT))


def gpu_bytes_of(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


class LossTerms(NamedTuple):
    """The scalar to minimise, and each depth's sum for the log."""

    total: Tensor
    """Scalar fp32: sum over depths and rows of ``row_weight * loss``."""
    sum_K: Tensor
    """fp32, detached: sum of the unweighted loss over each depth's targets."""
    count_K: Tensor
    """fp32: number of each depth's targets, the rows of a weight other than 0."""


def depth_weights(num_depths: int, decay: float) -> list[float]:
    """Return weights proportional to ``decay ** (k - 1)`` that sum to 1 (FastMTP, arXiv:2509.18362, equation 2)."""
    raw = [decay**index for index in range(num_depths)]
    return [value / sum(raw) for value in raw]


def align_to_targets(starts: Sequence[Tensor]) -> Tensor:
    """Move depth k's rows from start row t to target row t+k, so that all depths of a target share a row.

    Args:
        starts: Depth k at index k-1, each of shape (B, T, ...): B sequences of T start rows.

    Returns:
        Shape (K, B, T, ...); the first k rows of depth k are 0, as no start precedes them by k.
    """
    others = [0, 0] * (starts[0].ndim - 2)
    return torch.stack(
        [pad(rows, [*others, depth, 0])[:, : rows.shape[1]] for depth, rows in enumerate(starts, start=1)]
    )


def chain_losses(tv_KN: Tensor, row_weight_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of ``e2e_tv`` and their derivative with respect to each row's ``tv``.

    A draft is useful only if all earlier drafts of its round were accepted. Depth k of start s (at target row s + k) is
    accepted with probability ``1 - tv``. The probability that the first j drafts are all accepted is the product of
    these, and ``1 - product`` is the loss of depth j (arXiv:2606.12370: ``1 - 1/K sum_j prod_{i<=j} (1 - tv_i)`` is the
    mean of these losses). Depths without a target at a start are left out of its products.

    Args:
        row_weight_KN: Weight of each row's loss; 0 where depth k has no valid target at the row.

    Returns:
        The loss of each row, 0 where its weight is 0, and the derivative of ``sum(row_weight * loss)`` with respect to
        each row's ``tv``. Both of shape (K, N).
    """
    weight_KS, tv_KS = (to_starts(one) for one in (row_weight_KN, tv_KN))
    kept_KS = torch.where(weight_KS != 0, 1 - tv_KS, 1.0)
    loss_KS = torch.where(weight_KS != 0, 1 - kept_KS.cumprod(dim=0), 0.0)
    slope_KS = torch.zeros_like(kept_KS)
    for depth in range(len(tv_KN)):
        others_KS = kept_KS.clone()
        others_KS[depth] = 1.0
        slope_KS[depth] = (weight_KS * others_KS.cumprod(dim=0))[depth:].sum(dim=0)
    slope_KS = torch.where(weight_KS != 0, slope_KS, 0.0)
    return _to_targets(loss_KS), _to_targets(slope_KS)


def to_starts(aligned_KN: Tensor) -> Tensor:
    """Undo :func:`align_to_targets`, also on flattened sequences: rows that wrap around are never valid targets.

    Args:
        aligned_KN: Depth k's row of start s at target row s + k.

    Returns:
        Shape (K, N), all depths of a start in one column.
    """
    return torch.stack([row_N.roll(-depth) for depth, row_N in enumerate(aligned_KN, start=1)])


def _to_targets(starts_KN: Tensor) -> Tensor:
    return torch.stack([row_N.roll(depth) for depth, row_N in enumerate(starts_KN, start=1)])


def row_work(loss: Loss, teacher_logits_CV: Tensor | None, temperature: float, dtype: torch.dtype) -> RowWork:
    """Return a function that computes loss, and gradient in a dtype, for one chunk of rows.

    It is called for one depth at a time, with that depth's ``logits_CV`` and ``targets_C``, and may write the gradient
    into the logits.

    On a GPU it is compiled (``upstream/compiled.py``): one by one, its operations read and write each logit ten times.

    On a CPU it works on a few rows at a time. A chunk's tensors are larger than a CPU's cache, and fresh memory of that
    size costs page faults: the whole chunk at once takes two to three times as long. The gradients of several blocks
    are written into the logits.
    """
    in_dtype = _in_dtype(resolved(loss.rows), dtype)
    teachers = None
    if teacher_logits_CV is not None:
        prepare = fused(loss.prepared, teacher_logits_CV.device)
        teachers = [prepare(block, temperature) for block in _blocks(teacher_logits_CV)]

    def work(logits_CV: Tensor, targets_C: Tensor) -> RowLoss:
        blocks = _blocks(logits_CV)
        of_teacher = teachers or [None] * len(blocks)
        rows_fn = fused(in_dtype, logits_CV.device)
        if len(blocks) == 1:
            return rows_fn(logits_CV, of_teacher[0], targets_C, temperature)
        losses = []
        for block, teacher, targets in zip(blocks, of_teacher, targets_C.split(len(blocks[0])), strict=True):
            row = rows_fn(block, teacher, targets, temperature)
            losses.append(row.loss_C)
            block.copy_(row.gradient_CV)
        return RowLoss(torch.cat(losses), logits_CV)

    return work


@functools.cache
def _in_dtype(rows_fn: RowsFn, dtype: torch.dtype) -> RowsFn:
    def rows(logits_CV: Tensor, teacher: Any, targets_C: Tensor, temperature: float) -> RowLoss:
        row = rows_fn(logits_CV, teacher, targets_C, temperature)
        return RowLoss(row.loss_C, row.gradient_CV.to(dtype))

    return rows


def _blocks(logits_CV: Tensor) -> tuple[Tensor, ...]:
    num_rows, vocab_size = logits_CV.shape
    return logits_CV.split(max(1, BLOCK_NUMBERS // vocab_size if logits_CV.device.type == "cpu" else num_rows))


class _KnownGradient(torch.autograd.Function):
    """A loss whose gradient with respect to the hidden states was computed with it."""

    @staticmethod
    def forward(ctx: Any, _student_KND: Tensor, total: Tensor, gradient_KND: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_KND)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        (gradient_KND,) = ctx.saved_tensors
        return gradient_KND * grad_total, None, None


def frozen_head_loss(
    student_KND: Tensor,
    teacher_ND: Tensor,
    lm_head_VD: Tensor,
    targets_N: Tensor,
    row_weight_KN: Tensor,
    *,
    kind: str,
    temperature: float = 1.0,
    own_heads: Sequence[Tensor] | None = None,
    teacher_bound: float | None = None,
    compute_dtype: torch.dtype | None = None,
    used_N: Tensor | None = None,
) -> LossTerms:
    """Return the weighted loss of all depths, rows chunked by target position.

    Args:
        student_KND: The head's final hidden states, aligned to target rows (``align_to_targets``). Or those of some
            starts, all depths in one column: ``teacher_ND`` is then (K, N, D), and ``targets_N`` (K, N).
        teacher_ND: The trunk's final hidden states at the same target rows.
        row_weight_KN: fp32, 0 where depth k has no valid target at the row.
        kind: The loss, by its name in ``losses/catalogue.py``.
        temperature: Softens p and q of every loss that distils.
        own_heads: Frozen output matrix of each depth; None if the head shares the trunk's.
        teacher_bound: The c of ``c tanh(logits / c)`` for the trunk's logits; None leaves them unbounded.
        compute_dtype: The dtype of the products with the output matrix; softmax and losses are in fp32. A matrix held
            in another dtype is converted once for all rows. None uses the matrix's own dtype.
        used_N: int64, the rows of a weight other than 0, where the host knows them; None looks at the weights, for
            which the host waits for the device.
    """
    loss, compute_dtype, by_start = find_loss(kind), compute_dtype or lm_head_VD.dtype, targets_N.ndim > 1
    used_N = (row_weight_KN != 0).any(dim=0).nonzero().squeeze(1) if used_N is None else used_N
    num_rows = chunk_rows(len(lm_head_VD), gpu_bytes_of(lm_head_VD.device))
    with torch.no_grad(), torch.autocast(student_KND.device.type, enabled=False):
        # Convert once for all chunks.
        lm_head_VD = lm_head_VD.to(compute_dtype)
        heads = _converted(own_heads or [lm_head_VD] * len(student_KND), compute_dtype)
        gradient_KND = torch.zeros_like(student_KND)
        loss_KN = torch.zeros_like(row_weight_KN)
        # Memory for the logits of all chunks and depths, as fresh memory costs page faults on a CPU.
        is_on_cpu = lm_head_VD.device.type == "cpu"
        buffer_CV = lm_head_VD.new_empty(min(len(used_N), num_rows), len(lm_head_VD)) if is_on_cpu else None
        every = range(len(heads))
        together = [[depth] for depth in every] if by_start else [every]
        for depths, rows_C in product(together, used_N.split(num_rows)):
            of_target = (depths[0], rows_C) if by_start else rows_C
            teacher_CD = teacher_ND[of_target].to(compute_dtype)
            teacher_CV = _bounded(teacher_CD @ lm_head_VD.T, teacher_bound) if loss.distils else None
            work = row_work(loss, teacher_CV, temperature, compute_dtype)
            del teacher_CV  # The work keeps what it reads of them.
            for depth in depths:
                output_VD, state_CD = heads[depth], student_KND[depth, rows_C].to(compute_dtype)
                logits_CV = torch.mm(state_CD, output_VD.T, out=None if buffer_CV is None else buffer_CV[: len(rows_C)])
                row = work(logits_CV, targets_N[of_target])
                loss_KN[depth, rows_C] = row.loss_C
                gradient_KND[depth, rows_C] = (row.gradient_CV @ output_VD).to(gradient_KND.dtype)
                del logits_CV, row
            # Before the next chunk's teacher logits are computed.
            del work
    return _terms(loss, student_KND, gradient_KND, loss_KN, row_weight_KN, by_start)


def _converted(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    # Depths may share a matrix.
    converted = {matrix: matrix.to(dtype) for matrix in matrices}
    return [converted[matrix] for matrix in matrices]


def _bounded(logits_CV: Tensor, bound: float | None) -> Tensor:
    return logits_CV if bound is None else logits_CV.div_(bound).tanh_().mul_(bound)


def _terms(
    loss: Loss, student_KND: Tensor, gradient_KND: Tensor, loss_KN: Tensor, row_weight_KN: Tensor, by_start: bool
) -> LossTerms:
    """Return the weighted loss of rows whose own losses and gradients are known; the gradients are scaled in place."""
    slope_KN = row_weight_KN
    combine = resolved(loss.combine)
    if combine is not None and by_start:
        loss_KN, slope_KN = map(to_starts, combine(_to_targets(loss_KN), _to_targets(row_weight_KN)))
    elif combine is not None:
        loss_KN, slope_KN = combine(loss_KN, row_weight_KN)
    gradient_KND *= slope_KN[..., None].to(gradient_KND.dtype)
    counted_KN = row_weight_KN != 0
    sum_K = (loss_KN * counted_KN).sum(dim=1)
    count_K = counted_KN.sum(dim=1).float()
    return LossTerms(_KnownGradient.apply(student_KND, (row_weight_KN * loss_KN).sum(), gradient_KND), sum_K, count_K)
