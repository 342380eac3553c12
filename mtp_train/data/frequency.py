"""The tokens that a head may draft: those that the training text is made of.

FR-Spec (arXiv:2502.14856) and FastMTP (arXiv:2509.18362): with a large vocabulary most of a draft's cost is
reading the output matrix, and few tokens make up most of a text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from mtp_train.data.tokenize import Document


def frequent_tokens(documents: Sequence[Document], size: int, vocab_size: int, always: Collection[int]) -> list[int]:
    """Return the ``size`` most frequent target tokens, in ascending order.

    Ties, and places left where the text has fewer tokens, go to the lower ids, which tokenizers learnt first.

    Args:
        documents: The training text.
        size: How many, at most ``vocab_size``.
        vocab_size: Tokens that there are.
        always: Tokens that are in whatever their count: those that end a text.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        np.add.at(counts_V, document.input_ids[document.loss_mask], 1)
    counts = counts_V.tolist()
    ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
    return sorted(ranked[:size])


def keep_targets(documents: Sequence[Document], vocab: Collection[int]) -> list[Document]:
    """Return the documents with no targets but tokens of ``vocab``: others a head of that vocabulary cannot draft.

    Documents that are left without a target are left out.
    """
    vocab_ids = np.array(sorted(vocab))
    kept = [
        replace(document, loss_mask=document.loss_mask & np.isin(document.input_ids, vocab_ids))
        for document in documents
    ]
    return [document for document in kept if document.has_target()]
