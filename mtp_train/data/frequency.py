"""Count the tokens of a text, and rank the vocabulary by these counts: the choice of a reduced draft vocabulary.

Shapes: V vocabulary.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_train.data.tokenize import Document
from mtp_train.weights.writing import write_bytes

Counts = npt.NDArray[np.int64]
COUNTS_FILE = "data/target_counts.npz"
"""In the directory of a run: how often each token is a target of its training text."""


def target_counts(documents: Iterable[Document], vocab_size: int) -> Counts:
    """Return how often each token is a target, (V,)."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        np.add.at(counts_V, document.input_ids[document.loss_mask], 1)
    return counts_V


def ranks(counts_V: Counts, always: Collection[int]) -> Counts:
    """Return the rank of every token, 0 for the first, (V,): a draft vocabulary of R tokens holds ranks 0 to R - 1.

    Tokens with equal counts, including tokens that do not occur, are ranked by id: tokenizers assign low ids first.

    Args:
        counts_V: Number of occurrences of each token.
        always: Tokens that come first whatever their count, such as end-of-text tokens.
    """
    token_V = np.arange(len(counts_V))
    order_V = np.lexsort((token_V, -counts_V, ~np.isin(token_V, list(always))))
    ranks_V = np.empty_like(counts_V)
    ranks_V[order_V] = token_V
    return ranks_V


def frequent_tokens(documents: Sequence[Document], size: int, vocab_size: int, always: Collection[int]) -> list[int]:
    """Return the ``size`` most frequent targets of the documents by :func:`ranks`, in ascending order."""
    return np.flatnonzero(ranks(target_counts(documents, vocab_size), always) < size).tolist()


def save_counts(counts_V: Counts, path: Path) -> None:
    """Write counts to a file, replacing an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, counts=counts_V)
    write_bytes(path, buffer.getvalue())


def load_counts(path: Path, vocab_size: int) -> Counts | None:
    """Return the counts in a file; None if it is missing or damaged, or has the counts of another vocabulary."""
    try:
        # numpy.load would leave a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            counts_V: Counts = stored["counts"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return counts_V if counts_V.shape == (vocab_size,) and counts_V.dtype == np.int64 else None
