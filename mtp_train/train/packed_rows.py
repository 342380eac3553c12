"""Run a head over packed rows, with the depths aligned by target row.

Shapes: B packed rows, T tokens, D hidden; in :class:`AlignedRows` K depths and N = B * T target rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.alignment import shift_left, valid_targets
from mtp_train.heads.head import Head
from mtp_train.losses.chunked import align_to_targets
from mtp_train.trunk.ends import Ends


class AlignedRows(NamedTuple):
    """Inputs of losses and metrics, all depths aligned by target row."""

    student_KND: Tensor
    """The head's states, which may have another width than the trunk's."""
    teacher_ND: Tensor
    targets_N: Tensor
    valid_KN: Tensor
    starts_N: Tensor
    """bool, at start rows: whether a decoding round can begin there, that is, whether the next token is a target."""


def valid_rows(batch: PackedBatch, num_depths: int) -> Tensor:
    """Return at which target rows each depth has a target that counts in the loss: bool, (K, N)."""
    valid = [valid_targets(batch.document_BT, batch.loss_mask_BT, depth) for depth in range(1, num_depths + 1)]
    return align_to_targets(valid).flatten(1, 2)


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
) -> AlignedRows:
    """Run the head over packed rows and align the depths by target row.

    Args:
        hidden_BTD: The trunk's hidden states of the rows, zeros on padding.
        apart: See :func:`mtp_train.heads.step.unroll`.
        autocast: The dtype of autocast for the head's products; None and fp32 leave autocast as it is.
    """
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
        )
    return AlignedRows(
        align_to_targets(starts).flatten(1, 2),
        ends.normed(hidden_BTD).flatten(0, 1),
        shift_left(batch.tokens_BT, 1, 0).flatten(),
        valid_rows(batch, num_depths),
        # Depth 0 stands for the trunk: it predicts the token that depth 1 reads.
        valid_targets(batch.document_BT, batch.loss_mask_BT, 0).flatten(),
    )
