"""The hidden states that heads are trained on, and where they come from.

:class:`States` is what training sees. On the host it prepares a call (:meth:`States.prepare`) while the device computes
the step before; in a module's forward it returns the states. Here a trunk in memory computes them, whole or offloaded
(:class:`TrunkStates`); :class:`mtp_train.train.shard.ShardedStates` computes them in shards, and
:class:`mtp_train.train.hidden_cache.CachedStates` reads those of another source from the disk.

Attention masks isolate documents only in attention layers. A Gated DeltaNet layer and its convolution carry state along
the row, and transformers' torch implementations ignore the sequence boundaries that the CUDA kernels take: documents
would leak into each other silently. So each document becomes a row of its own, padded on the right, and its hidden
states are copied back to the places of its tokens. All layers are causal, so that padding on the right needs no mask. A
mask would have the square of a row's length, and would keep GPUs from their fastest attention.

Shapes: B packed rows, T tokens, N documents of a group, L padded length, D hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import Trunk


class Segment(NamedTuple):
    """The position of one document in the packed batch."""

    row: int
    start: int
    length: int


Forwards = list[list[Segment]]
"""The forward passes that compute the hidden states of a packed batch, planned on the host: the documents of each. A
pass without documents is made where another process, with which a trunk is shared, needs more passes."""


def segments(document_BT: NDArray[np.int64]) -> list[Segment]:
    """List the documents of a packed batch, row by row."""
    found: list[Segment] = []
    for row, numbers_T in enumerate(document_BT):
        ends = (np.flatnonzero(np.diff(numbers_T)) + 1).tolist()
        for start, end in pairwise([0, *ends, len(numbers_T)]):
            if numbers_T[start] != PADDING_DOCUMENT:
                found.append(Segment(row, start, end - start))
    return found


def group_by_length(found: list[Segment], max_tokens: int) -> Forwards:
    """Group documents of similar length so that no group, padded to its longest, exceeds ``max_tokens``."""
    groups: Forwards = []
    for segment in sorted(found, key=lambda one: one.length, reverse=True):
        if groups and (len(groups[-1]) + 1) * groups[-1][0].length <= max_tokens:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def isolated_hidden(
    trunk: Trunk,
    tokens_BT: Tensor,
    document_BT: Tensor,
    forwards: Forwards | None = None,
) -> Tensor:
    """Return the trunk's hidden states of packed documents, each computed as if it were alone.

    Args:
        forwards: The passes, planned from the same documents. None plans them here: the host waits for the device's
            ``document_BT``.

    Returns:
        Shape (B, T, D); 0 on padding. No gradient.
    """
    hidden_BTD: Tensor | None = None
    with torch.no_grad():
        if forwards is None:
            forwards = group_by_length(segments(document_BT.cpu().numpy()), tokens_BT.numel())
        for group in forwards:
            if not group:
                trunk.hidden(tokens_BT[:1, :1])
                continue
            # The longest comes first.
            rows_NL = tokens_BT.new_zeros(len(group), group[0].length)
            for index, (row, start, length) in enumerate(group):
                rows_NL[index, :length] = tokens_BT[row, start : start + length]
            hidden_NLD = trunk.hidden(rows_NL)
            if hidden_BTD is None:
                hidden_BTD = hidden_NLD.new_zeros(*tokens_BT.shape, hidden_NLD.shape[-1])
            for index, (row, start, length) in enumerate(group):
                hidden_BTD[row, start : start + length] = hidden_NLD[index, :length]
    if hidden_BTD is None:
        return trunk.embed(tokens_BT).new_zeros(*tokens_BT.shape, trunk.state_width)
    return hidden_BTD


class PackedRow(Protocol):
    """A row of documents, see :class:`mtp_train.data.pack.PackedSequence`."""

    @property
    def document_T(self) -> NDArray[np.int64]: ...
    @property
    def members(self) -> tuple[int, ...]: ...


Shares = Sequence[Sequence[PackedRow]]
"""The rows of every process, which makes its call at the same time."""


class States(nn.Module):
    """The trunk's hidden states of packed rows, and the ends of the trunk."""

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.ends = ends

    @abstractmethod
    def prepare(self, shares: Shares, rank: int, max_tokens: int | None = None) -> Tensor | Forwards:
        """Prepare a call on the host: the states, or the passes that compute them.

        Args:
            rank: This process.
            max_tokens: Tokens of one pass, padding included; a longer document has a pass of its own. None is B * T.
        """

    @abstractmethod
    def forward(self, tokens_BT: Tensor, document_BT: Tensor, prepared: Any = None) -> Tensor:
        """Return the states, shape (B, T, D); 0 on padding. No gradient.

        Args:
            prepared: As :meth:`prepare` returned it, the states on the tokens' device.
        """

    def expect(self, documents: Iterator[int]) -> None:
        """Learn the documents of this process's coming calls, in order, by their numbers; some sources fetch ahead."""

    def close(self) -> str:
        """Let go of the source; return a sentence about it for the log, empty if there is nothing to say."""
        return ""

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """See :meth:`mtp_train.trunk.ends.Ends.computing_in`."""
        return self.ends.computing_in(dtype)


class TrunkStates(States):
    """States that a trunk in this process computes."""

    ends: Trunk

    def prepare(self, shares: Shares, rank: int, max_tokens: int | None = None) -> Forwards:
        """Plan the passes over this process's rows."""
        document_BT = np.stack([one.document_T for one in shares[rank]])
        return group_by_length(segments(document_BT), max_tokens or document_BT.size)

    def forward(self, tokens_BT: Tensor, document_BT: Tensor, prepared: Any = None) -> Tensor:
        return isolated_hidden(self.ends, tokens_BT, document_BT, prepared)


class StoredStates(States):
    """States of whole documents that were computed elsewhere, by their numbers.

    Args:
        width: Of the states, D.
        dtype: In which they are returned.
    """

    def __init__(self, ends: Ends, *, width: int, dtype: torch.dtype) -> None:
        super().__init__(ends)
        self.width = width
        self.dtype = dtype

    @abstractmethod
    def document(self, number: int) -> Tensor:
        """Return the states of a document, shape (T, D), on the CPU."""

    def prepare(self, shares: Shares, rank: int, max_tokens: int | None = None) -> Tensor:
        """Return the states of this process's rows, in the dtype that they are stored in."""
        # Where a process has nothing to do, its row has no document.
        none = torch.zeros(0, self.width)
        rows = [torch.cat([self.document(number) for number in row.members] or [none]) for row in shares[rank]]
        length = len(shares[rank][0].document_T)
        return torch.stack([nn.functional.pad(row_TD, (0, 0, 0, length - len(row_TD))) for row_TD in rows])

    def forward(self, tokens_BT: Tensor, document_BT: Tensor, prepared: Any = None) -> Tensor:
        return prepared.to(self.dtype)
