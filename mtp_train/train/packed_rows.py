"""Run a head over packed rows, with the depths aligned by target row, or at some start rows.

Shapes: B packed rows, T tokens, P start rows of each, D hidden; in :class:`AlignedRows` K depths and N = B * T target
rows, or N = B * P start rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.alignment import at_starts, shift_left, valid_depths, valid_targets
from mtp_train.heads.head import Head
from mtp_train.losses.chunked import align_to_targets
from mtp_train.trunk.ends import Ends


class AlignedRows(NamedTuple):
    """Inputs of losses and metrics, all depths aligned by target row.

    At some start rows, all depths of a start are in one column. Trunk and targets then have a row for each depth:
    ``teacher_ND`` has the shape (K, N, D), ``targets_N`` (K, N).
    """

    student_KND: Tensor
    """The head's states, which may have another width than the trunk's."""
    teacher_ND: Tensor
    targets_N: Tensor
    valid_KN: Tensor
    starts_N: Tensor
    """bool, at start rows: whether a decoding round can begin there, that is, whether the next token is a target."""


def valid_rows(batch: PackedBatch, num_depths: int, starts_BP: Tensor | None = None) -> Tensor:
    """Return at which rows of :class:`AlignedRows` each depth has a target that counts in the loss: bool, (K, N)."""
    valid = valid_depths(batch.document_BT, batch.loss_mask_BT, num_depths, starts_BP)
    return (align_to_targets(valid) if starts_BP is None else torch.stack(valid)).flatten(1, 2)


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return autocast to a dtype; for fp32 and None, a context that leaves autocast as it is."""
    return nullcontext() if dtype in (None, torch.float32) else torch.autocast(device.type, dtype)


def aligned_rows(
    ends: Ends,
    head: Head,
    batch: PackedBatch,
    hidden_BTD: Tensor,
    num_depths: int,
    *,
    apart: bool = False,
    recompute: bool = False,
    autocast: torch.dtype | None = None,
    starts_BP: Tensor | None = None,
) -> AlignedRows:
    """Run the head over packed rows and align the depths by target row.

    Args:
        hidden_BTD: The trunk's hidden states of the rows, zeros on padding.
        apart: See :func:`mtp_train.heads.step.unroll`.
        autocast: The dtype of autocast for the head's products; None and fp32 leave autocast as it is.
        starts_BP: int, ascending: the start rows that count, -1 for none; None for all.
    """
    from_BP = None if starts_BP is None else starts_BP.clamp(min=0)
    state_BTD = ends.head_input(hidden_BTD, head.convention)
    with autocasting(hidden_BTD.device, autocast):
        starts = head.unroll(
            state_BTD,
            batch.tokens_BT,
            head.embedding(ends.embed),
            num_depths=num_depths,
            positions_BT=batch.positions_BT,
            document_BT=batch.document_BT,
            apart=apart,
            recompute=recompute,
            starts_BP=from_BP,
        )
    targets_BT = shift_left(batch.tokens_BT, 1, 0)
    # Depth 0 stands for the trunk: it predicts the token that depth 1 reads.
    starts_BT = valid_targets(batch.document_BT, batch.loss_mask_BT, 0)
    if from_BP is None:
        student, teacher, targets = align_to_targets(starts), ends.normed(hidden_BTD), targets_BT
    else:
        # Past the end of a row no target is valid.
        at = [(from_BP + depth).clamp(max=targets_BT.shape[1] - 1) for depth in range(1, num_depths + 1)]
        student = torch.stack(starts)
        teacher = ends.normed(torch.stack([at_starts(hidden_BTD, one_BP) for one_BP in at]))
        targets = torch.stack([at_starts(targets_BT, one_BP) for one_BP in at])
    return AlignedRows(
        student.flatten(1, 2),
        teacher.flatten(-3, -2),
        targets.flatten(-2),
        valid_rows(batch, num_depths, starts_BP),
        at_starts(starts_BT, from_BP).flatten(),
    )
