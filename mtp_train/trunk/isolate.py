"""Run the trunk over packed rows with every document isolated, in every kind of layer.

Attention masks isolate documents only in attention layers. A Gated DeltaNet layer and its convolution carry state along
the row, and transformers' torch implementations ignore the sequence boundaries that the CUDA kernels take: documents
would leak into each other silently. So each document becomes a row of its own, padded on the right, and its hidden
states are copied back to the places of its tokens. All layers are causal, so that padding on the right needs no mask. A
mask would have the square of a row's length, and would keep GPUs from their fastest attention.

Shapes: B packed rows, T tokens, N documents of a group, L padded length, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_train.heads.alignment import PADDING_DOCUMENT
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
        starts = [0, *(np.flatnonzero(np.diff(numbers_T)) + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(numbers_T)], strict=True):
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
    """The documents of each pass."""
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
        tokens_BT: int, packed tokens.
        document_BT: int, document number of each token, ``PADDING_DOCUMENT`` on padding.
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
