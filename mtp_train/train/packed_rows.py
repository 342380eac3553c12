"""Run trunk and head over packed rows: documents isolated in every kind of layer, depths aligned by target row.

Attention masks isolate documents only in attention layers. A Gated DeltaNet layer and its convolution carry state along
the row, and transformers' torch implementations ignore the sequence boundaries that the CUDA kernels take: documents
would leak into each other silently. So each document becomes a row of its own, padded on the right, and its hidden
states are copied back to the places of its tokens. All layers are causal, so that padding on the right needs no mask. A
mask would have the square of a row's length, and would keep GPUs from their fastest attention.

Shapes: B packed rows, T tokens, N documents of a group, L padded length, D hidden; in :class:`AlignedRows` K depths and
N = B * T target rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.alignment import PADDING_DOCUMENT, shift_left, valid_targets
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.losses.chunked import align_to_targets
from mtp_train.trunk.load import Trunk


class Segment(NamedTuple):
    """The position of one document in the packed batch."""

    row: int
    start: int
    length: int


def segments(document_BT: NDArray[np.int64]) -> list[Segment]:
    """List the documents of a packed batch, row by row."""
    found: list[Segment] = []
    for row, numbers_T in enumerate(document_BT):
        ends = (np.flatnonzero(np.diff(numbers_T)) + 1).tolist()
        for start, end in pairwise([0, *ends, len(numbers_T)]):
            if numbers_T[start] != PADDING_DOCUMENT:
                found.append(Segment(row, start, end - start))
    return found


def group_by_length(found: list[Segment], max_tokens: int) -> list[list[Segment]]:
    """Group documents of similar length so that no group, padded to its longest, exceeds ``max_tokens``."""
    groups: list[list[Segment]] = []
    for segment in sorted(found, key=lambda one: one.length, reverse=True):
        if groups and (len(groups[-1]) + 1) * groups[-1][0].length <= max_tokens:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


@dataclass(frozen=True)
class Forwards:
    """The forward passes that compute the hidden states of a packed batch, planned on the host."""

    groups: Sequence[Sequence[Segment]]
    num_calls: int
    """Number of passes to make: more than groups where another process needs more, see ``Trunk.calls_together``."""


def isolated_hidden(
    trunk: Trunk,
    tokens_BT: Tensor,
    document_BT: Tensor,
    max_tokens: int | None = None,
    forwards: Forwards | None = None,
) -> Tensor:
    """Return the trunk's hidden states of packed documents, each computed as if it were alone.

    Args:
        max_tokens: Tokens of one forward pass, padding included; a longer document has a pass of its own. None is B *
            T.
        forwards: The passes, planned from the same documents. None plans them here: the host waits for the device's
            ``document_BT``, and the processes that share the trunk exchange their numbers of passes.

    Returns:
        Shape (B, T, D); 0 on padding. No gradient.
    """
    hidden_BTD: Tensor | None = None
    with torch.no_grad():
        if forwards is None:
            groups = group_by_length(segments(document_BT.cpu().numpy()), max_tokens or tokens_BT.numel())
            # Before the first forward: the processes of a launch exchange their counts here, and all have to do so in
            # the same order.
            forwards = Forwards(groups, trunk.calls_together(len(groups)))
        for group in forwards.groups:
            longest = group[0].length
            rows_NL = tokens_BT.new_zeros(len(group), longest)
            for index, (row, start, length) in enumerate(group):
                rows_NL[index, :length] = tokens_BT[row, start : start + length]
            hidden_NLD = trunk.hidden(rows_NL)
            if hidden_BTD is None:
                hidden_BTD = hidden_NLD.new_zeros(*tokens_BT.shape, hidden_NLD.shape[-1])
            for index, (row, start, length) in enumerate(group):
                hidden_BTD[row, start : start + length] = hidden_NLD[index, :length]
        for _ in range(forwards.num_calls - len(forwards.groups)):
            trunk.hidden(tokens_BT[:1, :1])
    if hidden_BTD is None:
        return trunk.embed(tokens_BT).new_zeros(*tokens_BT.shape, trunk.state_width)
    return hidden_BTD


class AlignedRows(NamedTuple):
    """Inputs of losses and metrics, all depths aligned by target row."""

    student_KND: Tensor
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
        hidden_BTD: The trunk's hidden states of the rows, zeros on padding; None runs the trunk.
        forwards: See :func:`isolated_hidden`.
        apart: See :func:`mtp_train.heads.step.unroll`.
        autocast: The dtype of autocast for the head's products; None and fp32 leave autocast as it is.
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
    return AlignedRows(
        align_to_targets(starts).flatten(1, 2),
        trunk.normed(hidden_BTD).flatten(0, 1),
        shift_left(batch.tokens_BT, 1, 0).flatten(),
        valid_rows(batch, num_depths),
        # Depth 0 stands for the trunk: it predicts the token that depth 1 reads.
        valid_targets(batch.document_BT, batch.loss_mask_BT, 0).flatten(),
    )
