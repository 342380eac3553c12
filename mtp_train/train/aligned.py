"""Run trunk and head over packed rows and align the draft depths by target row."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.heads.alignment import shift_left, valid_targets
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.losses.chunked import align_to_targets
from mtp_train.trunk.isolate import Forwards, isolated_hidden
from mtp_train.trunk.load import Trunk


class PackedBatch(NamedTuple):
    """Packed rows on a device, all of shape (B, T)."""

    tokens_BT: Tensor
    positions_BT: Tensor
    document_BT: Tensor
    loss_mask_BT: Tensor


class AlignedRows(NamedTuple):
    """Inputs of losses and metrics, all depths aligned by target row."""

    student_KND: Tensor
    teacher_ND: Tensor
    targets_N: Tensor
    valid_KN: Tensor
    starts_N: Tensor
    """bool, at start rows: whether a decoding round can begin there, that is, whether the next token is a target."""


def autocasting(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return autocast to a dtype; for None, a context that leaves autocast as it is."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def aligned_rows(
    trunk: Trunk,
    head: MtpHead,
    batch: PackedBatch,
    num_depths: int,
    *,
    hidden_BTD: Tensor | None = None,
    forwards: Forwards | None = None,
    apart: bool = False,
    recompute: bool = False,
    autocast: torch.dtype | None = None,
) -> AlignedRows:
    """Run trunk and head over packed rows and align the depths by target row.

    The trunk runs outside of autocast, as in decoding.

    Args:
        batch: The rows.
        num_depths: K.
        hidden_BTD: The trunk's hidden states of the rows, zeros on padding; None runs the trunk.
        forwards: See :func:`mtp_train.trunk.isolate.isolated_hidden`.
        apart: See :func:`mtp_train.heads.step.unroll`.
        recompute: Likewise.
        autocast: The dtype of autocast for the head's products; None leaves autocast as it is.
    """
    trunk.show_layers(head.trunk_layers)
    if hidden_BTD is None:
        hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT, forwards=forwards)
    state_BTD = trunk.head_input(hidden_BTD, head.convention)
    with autocasting(hidden_BTD.device, autocast):
        starts = unroll(
            head,
            state_BTD,
            batch.tokens_BT,
            head.embedding(trunk.embed),
            num_depths=num_depths,
            positions_BT=batch.positions_BT,
            document_BT=batch.document_BT,
            apart=apart,
            recompute=recompute,
        )
    valid = [valid_targets(batch.document_BT, batch.loss_mask_BT, depth + 1) for depth in range(num_depths)]
    return AlignedRows(
        align_to_targets(starts).flatten(1, 2),
        trunk.normed(hidden_BTD).flatten(0, 1),
        shift_left(batch.tokens_BT, 1, 0).flatten(),
        align_to_targets(valid).flatten(1, 2),
        # Depth 0 stands for the trunk: it predicts the token that depth 1 reads.
        valid_targets(batch.document_BT, batch.loss_mask_BT, 0).flatten(),
    )
