"""The losses of ``losses/rows.py`` as Triton kernels that only read the logits and write the gradient.

One program computes one row in passes over blocks of it: the maximum and the sum of exponentials for softmax; the sums
for the gradient; the gradient, which overwrites the logits. Intermediate values stay in registers, in fp32. ``kl``
reads the head's logits twice and the trunk's once, ``ce`` reads the head's twice, the other losses read the head's
three times and the trunk's twice. One more pass over the trunk's logits serves all depths.

``torch.compile`` of ``losses/rows.py`` is the alternative. Inductor then chooses the passes, which changes with the
release of torch; the gradient takes memory beside the logits, in fp32; and the generated code cannot be inspected
without a device. Tests interpret and compile these kernels on machines without a GPU.

Shapes: C rows, V vocabulary, B columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtp_train.losses.catalogue import RowLoss
from mtp_train.losses.rows import LK_RATE

if TYPE_CHECKING:
    from mtp_train.losses.catalogue import RowWork

BLOCK = 4096
"""Columns per block: 16 per thread, also for narrow rows. With fewer, two threads would hold the same column, and one
could write its gradient before the other has read the logit."""
WARPS = 8
_LK_RATE = tl.constexpr(LK_RATE)


@triton.jit
def _scaled(row_ptr, column_B, temperature, width: tl.constexpr):
    """Load a block of logits divided by the temperature, -inf past the end of the row."""
    logits_B = tl.load(row_ptr + column_B, mask=column_B < width, other=float("-inf"))
    return logits_B.to(tl.float32) * (1.0 / temperature)


@triton.jit
def _normaliser(row_ptr, temperature, width: tl.constexpr, size: tl.constexpr):
    """Return a row's maximum, and the logarithm of the sum of exponentials relative to the maximum."""
    # Finite, so that a block of -inf alone gives 0 instead of NaN.
    peak = tl.full([], -3.0e38, tl.float32)
    sum_B = tl.zeros([size], tl.float32)
    for start in range(0, width, size):
        scaled_B = _scaled(row_ptr, start + tl.arange(0, size), temperature, width)
        higher = tl.maximum(peak, tl.max(scaled_B, axis=0))
        sum_B = sum_B * tl.exp(peak - higher) + tl.exp(scaled_B - higher)
        peak = higher
    return peak, tl.log(tl.sum(sum_B, axis=0))


@triton.jit
def _gain(weight_B, log_weight_B, log_other_B):
    """Return ``w log(w / o)``, 0 where w is 0."""
    return tl.where(weight_B == 0, 0.0, weight_B * (log_weight_B - log_other_B))


@triton.jit
def _half_sign(q_B, p_B):
    return tl.where(q_B > p_B, 0.5, tl.where(q_B < p_B, -0.5, 0.0))


@triton.jit
def _sums(
    logits_ptr,
    teacher_ptr,
    temperature,
    peak_q,
    log_sum_q,
    peak_p,
    log_sum_p,
    kind: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
):
    """Return a row's loss, the mean to subtract in its gradient, and the share of ``kl`` in ``lk``."""
    kl_B = tl.zeros([size], tl.float32)
    gap_B = tl.zeros([size], tl.float32)
    mean_B = tl.zeros([size], tl.float32)
    for start in range(0, width, size):
        column_B = start + tl.arange(0, size)
        log_q_B = _scaled(logits_ptr, column_B, temperature, width) - peak_q - log_sum_q
        log_p_B = _scaled(teacher_ptr, column_B, temperature, width) - peak_p - log_sum_p
        q_B = tl.exp(log_q_B)
        p_B = tl.exp(log_p_B)
        if kind == "reverse_kl":
            mean_B += _gain(q_B, log_q_B, log_p_B)
        else:
            gap_B += tl.abs(q_B - p_B)
            mean_B += q_B * _half_sign(q_B, p_B)
        if kind == "lk":
            kl_B += _gain(p_B, log_p_B, log_q_B)
    mean = tl.sum(mean_B, axis=0)
    loss = tl.sum(gap_B, axis=0) / 2
    share = tl.zeros([], tl.float32)
    if kind == "reverse_kl":
        loss = temperature * temperature * mean
    if kind == "lk":
        share = tl.exp((loss - 1) * _LK_RATE)
        loss = share * temperature * temperature * tl.sum(kl_B, axis=0) + (1 - share) * loss
    return loss, mean, share


@triton.jit
def measure_rows(rows_ptr, peak_ptr, log_sum_ptr, temperature, width: tl.constexpr, size: tl.constexpr):
    """Write each row's maximum and log-sum of exponentials."""
    row = tl.program_id(0)
    peak, log_sum = _normaliser(rows_ptr + row.to(tl.int64) * width, temperature, width, size)
    tl.store(peak_ptr + row, peak)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def cross_entropy_rows(logits_ptr, targets_ptr, loss_ptr, width: tl.constexpr, size: tl.constexpr):
    """Write each row's ``ce``, and overwrite the logits with its gradient."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * width
    target = tl.load(targets_ptr + row).to(tl.int32)
    peak, log_sum = _normaliser(logits_ptr, 1.0, width, size)
    loss_B = tl.zeros([size], tl.float32)
    for start in range(0, width, size):
        column_B = start + tl.arange(0, size)
        log_q_B = _scaled(logits_ptr, column_B, 1.0, width) - peak - log_sum
        loss_B -= tl.where(column_B == target, log_q_B, 0.0)
        gradient_B = tl.exp(log_q_B) - tl.where(column_B == target, 1.0, 0.0)
        tl.store(logits_ptr + column_B, gradient_B.to(logits_ptr.dtype.element_ty), mask=column_B < width)
    tl.store(loss_ptr + row, tl.sum(loss_B, axis=0))


@triton.jit
def distilled_rows(
    logits_ptr,
    teacher_ptr,
    peak_ptr,
    log_sum_ptr,
    loss_ptr,
    temperature,
    kind: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
):
    """Write each row's loss, and overwrite the head's logits with its gradient."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * width
    teacher_ptr += row.to(tl.int64) * width
    peak_p = tl.load(peak_ptr + row)
    log_sum_p = tl.load(log_sum_ptr + row)
    peak_q, log_sum_q = _normaliser(logits_ptr, temperature, width, size)
    if kind != "kl":
        loss, mean, share = _sums(
            logits_ptr, teacher_ptr, temperature, peak_q, log_sum_q, peak_p, log_sum_p, kind, width, size
        )
    kl_B = tl.zeros([size], tl.float32)
    for start in range(0, width, size):
        column_B = start + tl.arange(0, size)
        log_q_B = _scaled(logits_ptr, column_B, temperature, width) - peak_q - log_sum_q
        log_p_B = _scaled(teacher_ptr, column_B, temperature, width) - peak_p - log_sum_p
        q_B = tl.exp(log_q_B)
        p_B = tl.exp(log_p_B)
        if kind == "kl":
            kl_B += _gain(p_B, log_p_B, log_q_B)
            gradient_B = temperature * (q_B - p_B)
        elif kind == "reverse_kl":
            gradient_B = temperature * (_gain(q_B, log_q_B, log_p_B) - q_B * mean)
        else:
            gradient_B = q_B * (_half_sign(q_B, p_B) - mean) / temperature
            if kind == "lk":
                gradient_B = share * temperature * (q_B - p_B) + (1 - share) * gradient_B
        tl.store(logits_ptr + column_B, gradient_B.to(logits_ptr.dtype.element_ty), mask=column_B < width)
    if kind == "kl":
        loss = temperature * temperature * tl.sum(kl_B, axis=0)
    tl.store(loss_ptr + row, loss)


def kernel_device() -> str | None:
    """Return the device type that kernels run on here; None if there is no such device."""
    if triton.knobs.runtime.interpret:
        return "cpu"
    try:
        return str(triton.runtime.driver.active.get_active_torch_device().type)
    except RuntimeError:
        return None


def row_work(kind: str, teacher_logits_CV: Tensor | None, temperature: float) -> RowWork:
    """Return a function that computes loss and gradient for one chunk of rows, equivalent to ``rows.row_losses``.

    It is called with the head's logits and the targets, and writes the gradient into these logits, in their dtype.

    Args:
        kind: The loss, by name. ``e2e_tv`` gives the ``tv`` of each row.
        teacher_logits_CV: The trunk's logits, contiguous; None for ``ce``.
        temperature: T.

    Raises:
        ValueError: A loss that distils has no teacher logits.
    """
    if kind == "ce":
        return _cross_entropy
    if teacher_logits_CV is None:
        raise ValueError(f"{kind}: no teacher logits; expected the trunk's. Give them, or use ce.")
    teacher_CV = teacher_logits_CV
    num_rows, width = teacher_CV.shape
    peak_C = torch.empty(num_rows, dtype=torch.float32, device=teacher_CV.device)
    log_sum_C = torch.empty_like(peak_C)
    measure_rows[(num_rows,)](teacher_CV, peak_C, log_sum_C, temperature, width, BLOCK, num_warps=WARPS)
    formula = "tv" if kind == "e2e_tv" else kind

    def distilled(logits_CV: Tensor, targets_C: Tensor) -> RowLoss:
        loss_C = torch.empty_like(peak_C)
        distilled_rows[(num_rows,)](
            logits_CV, teacher_CV, peak_C, log_sum_C, loss_C, temperature, formula, width, BLOCK, num_warps=WARPS
        )
        return RowLoss(loss_C, logits_CV)

    return distilled


def _cross_entropy(logits_CV: Tensor, targets_C: Tensor) -> RowLoss:
    num_rows, width = logits_CV.shape
    loss_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    cross_entropy_rows[(num_rows,)](logits_CV, targets_C, loss_C, width, BLOCK, num_warps=WARPS)
    return RowLoss(loss_C, logits_CV)
