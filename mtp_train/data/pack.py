"""Pack documents into sequences of one length, and sequences into the batches of a run.

A packed row with the documents ``a b c`` and ``d e`` in a sequence of 7::

    input_ids   a  b  c  d  e  0  0
    positions   0  1  2  0  1  0  0
    document    0  0  0  1  1 -1 -1

Documents never attend to each other and are never split. They are packed by best-fit decreasing, as in "Fewer
Truncations Improve Language Modeling" (arXiv:2404.10830), but within pools of shuffled documents, so that every epoch
packs them differently. All results depend on the arguments alone: a resumed run gets the batches of an unbroken one.

Shapes: B rows, T tokens, K depths, N documents, P start rows.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError
from mtp_train.heads.alignment import PADDING_DOCUMENT, valid_depths

Integers = NDArray[np.int64]
Groups = list[list[int]]
"""The documents of each sequence, by their numbers."""
POOLED_DOCUMENTS = 4096
"""Documents that are packed together. Pools keep the time linear in the number of documents; larger ones leave less
padding."""


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """One row of a batch.

    Args:
        input_ids_T: int64 tokens, 0 on padding.
        positions_T: int64, counted from 0 in every document, 0 on padding.
        document_T: int64 document number within the row, ``PADDING_DOCUMENT`` on padding.
        loss_mask_T: bool, whether the token may be a target.
        members: Indices of the row's documents among all packed documents, in the row's order.
        starts_P: int64, ascending: the start rows whose drafts count in the loss, after as many -1 as there are too
            few; None for all.
    """

    input_ids_T: Integers
    positions_T: Integers
    document_T: Integers
    loss_mask_T: NDArray[np.bool_]
    members: tuple[int, ...]
    starts_P: Integers | None = None


class PackedBatch(NamedTuple):
    """The rows of several sequences, all of shape (B, T): int64, and bool for the loss mask."""

    tokens_BT: Tensor
    positions_BT: Tensor
    document_BT: Tensor
    loss_mask_BT: Tensor


def pack_documents(
    documents: Sequence[Document], seq_len_tokens: int, *, pack: bool, seed: int, epoch: int
) -> list[PackedSequence]:
    """Return the sequences of one epoch, in order.

    Args:
        pack: False gives every document a sequence of its own.
    """
    groups = assign(token_counts(documents), seq_len_tokens, pack=pack, seed=seed, epoch=epoch)
    return [one_row(documents, group, seq_len_tokens) for group in groups]


def count_targets(sequence: PackedSequence, num_depths: int) -> tuple[int, ...]:
    """Return, for each of K depths, the number of rows with a valid target (``heads.alignment``)."""
    return tuple(int(one_1P.sum()) for one_1P in _valid(sequence, num_depths))


def _valid(sequence: PackedSequence, num_depths: int) -> list[Tensor]:
    document_1T = torch.from_numpy(sequence.document_T)[None]
    loss_mask_1T = torch.from_numpy(sequence.loss_mask_T)[None]
    starts_1P = None if sequence.starts_P is None else torch.from_numpy(sequence.starts_P)[None]
    return valid_depths(document_1T, loss_mask_1T, num_depths, starts_1P)


def with_starts(sequence: PackedSequence, num_starts: int, num_depths: int, seed: int, index: int) -> PackedSequence:
    """Return a sequence in which the drafts of some start rows count alone, of those with a target at any depth.

    They are one of each ``num_starts`` equal stretches of these rows, and every row is chosen with the same
    probability: every n-th one, from a random first one on.

    Args:
        index: The number of the sequence over all epochs.
    """
    (rows_N,) = torch.stack(_valid(sequence, num_depths)).any(0)[0].numpy().nonzero()
    if len(rows_N) > num_starts:
        first = int(_generator(seed, f"starts:{index}").integers(len(rows_N)))
        rows_N = rows_N[(np.arange(num_starts) * len(rows_N) + first) // num_starts]
    return replace(sequence, starts_P=np.pad(rows_N, (num_starts - len(rows_N), 0), constant_values=-1))


def global_batches(
    documents: Sequence[Document],
    *,
    seq_len_tokens: int,
    pack: bool,
    sequences_per_step: int,
    seed: int,
    num_depths: int = 1,
    num_starts: int | None = None,
) -> Callable[[int], list[PackedSequence]]:
    """Return a function from a step (counted from 0) to its sequences, over all processes.

    Epochs follow one another without end; a step may span two. The sequences depend on the step alone, so a run can
    resume from the number of its step.

    Args:
        num_starts: The number of start rows that count in each sequence, see :func:`with_starts`; None for all.
    """
    starts = [0]
    assigned = lru_cache(maxsize=1)(partial(assign, token_counts(documents), seq_len_tokens, pack=pack, seed=seed))

    def members(index: int) -> list[int]:
        """Return the documents of a sequence, counted over all epochs."""
        # Epochs differ in their number of sequences: the start of one is known once all earlier ones are packed.
        while starts[-1] <= index:
            starts.append(starts[-1] + len(assigned(epoch=len(starts) - 1)))
        epoch = bisect_right(starts, index) - 1
        return assigned(epoch=epoch)[index - starts[epoch]]

    lock = threading.Lock()

    def batch(step: int) -> list[PackedSequence]:
        first = step * sequences_per_step
        # States may be fetched ahead in another thread.
        with lock:
            groups = [members(index) for index in range(first, first + sequences_per_step)]
        rows = [one_row(documents, group, seq_len_tokens) for group in groups]
        if num_starts is None:
            return rows
        return [with_starts(row, num_starts, num_depths, seed, index) for index, row in enumerate(rows, start=first)]

    return batch


def full_batches(sequences: Sequence[PackedSequence], size: int) -> list[list[PackedSequence]]:
    """Divide sequences into batches of ``size``; the last one is filled up with copies that have no targets."""
    batches = [list(sequences[first : first + size]) for first in range(0, len(sequences), size)]
    for batch in batches[-1:]:
        spare = replace(batch[-1], loss_mask_T=np.zeros_like(batch[-1].loss_mask_T))
        batch += [spare] * (size - len(batch))
    return batches


def collate(sequences: Sequence[PackedSequence]) -> PackedBatch:
    """Stack sequences into the tensors of a batch."""
    return PackedBatch(
        *(
            torch.from_numpy(np.stack([getattr(one, field) for one in sequences]))
            for field in ("input_ids_T", "positions_T", "document_T", "loss_mask_T")
        )
    )


def token_counts(documents: Sequence[Document]) -> Integers:
    if not documents:
        raise DataError("data: no document; expected at least one to train on. Check data.sources and data.holdout.")
    return np.array([len(document.input_ids) for document in documents], dtype=np.int64)


def assign(lengths_N: Integers, seq_len_tokens: int, *, pack: bool, seed: int, epoch: int) -> Groups:
    """Shuffle documents, and assign them to sequences."""
    generator = _generator(seed, epoch)
    order_N = generator.permutation(len(lengths_N))
    if not pack:
        return [[int(index)] for index in order_N]
    groups: Groups = []
    for start in range(0, len(order_N), POOLED_DOCUMENTS):
        pool_N = order_N[start : start + POOLED_DOCUMENTS]
        packed = _best_fit(pool_N, lengths_N[pool_N], seq_len_tokens)
        # Best fit puts the long documents into the first sequences. Shuffle, so that a step has all lengths.
        groups += [packed[index] for index in generator.permutation(len(packed))]
    return groups


def _best_fit(pool_N: Integers, lengths_N: Integers, seq_len_tokens: int) -> Groups:
    """Assign each document, the longest first, to the sequence in which it leaves the least room."""
    groups: Groups = []
    by_room: list[tuple[int, int]] = []
    for place in np.argsort(-lengths_N, kind="stable"):
        length = int(lengths_N[place])
        tightest = bisect_left(by_room, (length, 0))
        if tightest == len(by_room):
            room = seq_len_tokens
            group = len(groups)
            groups.append([])
        else:
            room, group = by_room.pop(tightest)
        groups[group].append(int(pool_N[place]))
        insort(by_room, (room - length, group))
    return groups


def _generator(seed: int, epoch: int | str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def one_row(documents: Sequence[Document], members: Sequence[int], seq_len_tokens: int) -> PackedSequence:
    input_ids_T = np.zeros(seq_len_tokens, dtype=np.int64)
    positions_T = np.zeros(seq_len_tokens, dtype=np.int64)
    document_T = np.full(seq_len_tokens, PADDING_DOCUMENT, dtype=np.int64)
    loss_mask_T = np.zeros(seq_len_tokens, dtype=np.bool_)
    start = 0
    for number, index in enumerate(members):
        document = documents[index]
        end = start + len(document.input_ids)
        input_ids_T[start:end] = document.input_ids
        positions_T[start:end] = np.arange(end - start)
        document_T[start:end] = number
        loss_mask_T[start:end] = document.loss_mask
        start = end
    return PackedSequence(input_ids_T, positions_T, document_T, loss_mask_T, tuple(members))
