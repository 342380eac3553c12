"""Documents in the form of transformers' Trainer: one per row, padded on the right, label -100 on other tokens than
targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from mtp_train.data.pack import PackedSequence

IGNORED = -100
Row = dict[str, Tensor]
_FILLING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}


def document_row(input_ids_T: NDArray[np.integer], loss_mask_T: NDArray[np.bool_]) -> Row:
    """Return a document's tokens, mask and labels, each int64 of shape (T,)."""
    tokens_T = torch.from_numpy(input_ids_T).long()
    labels_T = tokens_T.masked_fill(~torch.from_numpy(loss_mask_T), IGNORED)
    return {"input_ids": tokens_T, "attention_mask": torch.ones_like(tokens_T), "labels": labels_T}


def pad_rows(rows: Sequence[Row]) -> Row:
    """Pad rows on the right to the longest row; each tensor has shape (B, T)."""
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in _FILLING.items()
    }


class StepRows(Dataset[Row]):
    """The rows of a whole training in training order; a row depends on its index alone.

    Args:
        batch_fn: From a step (0-based) to its sequences, each of one document (``data.pack.global_batches``).
        num_steps: Steps of the training.
        rows_per_step: Rows of a step, over all processes.
    """

    def __init__(self, batch_fn: Callable[[int], Sequence[PackedSequence]], num_steps: int, rows_per_step: int) -> None:
        self._batch_fn = batch_fn
        self._num_steps, self._rows_per_step = num_steps, rows_per_step
        self._at_hand: tuple[int, Sequence[PackedSequence]] = (-1, ())

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._num_steps * self._rows_per_step

    def __getitem__(self, index: int) -> Row:
        """Return a row without its padding."""
        step, place = divmod(index, self._rows_per_step)
        if self._at_hand[0] != step:
            self._at_hand = (step, self._batch_fn(step))
        sequence = self._at_hand[1][place]
        length = int((sequence.document_T >= 0).sum())
        return document_row(sequence.input_ids_T[:length], sequence.loss_mask_T[:length])
