"""Choose a reduced draft vocabulary by the tokens' counts in a text."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from mtp_train.data.tokenize import Document


def frequent_tokens(documents: Iterable[Document], size: int, vocab_size: int, always: Collection[int]) -> list[int]:
    """Return the ``size`` tokens that are targets most often, in ascending order.

    Tokens with equal counts, including tokens that do not occur, are ranked by id: tokenizers assign low ids first.

    Args:
        documents: The text.
        size: Size of the vocabulary.
        vocab_size: Number of tokens to choose from.
        always: Tokens that are chosen first whatever their count, such as end-of-text tokens.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        np.add.at(counts_V, document.input_ids[document.loss_mask], 1)
    token_V = np.arange(vocab_size)
    order_V = np.lexsort((token_V, -counts_V, ~np.isin(token_V, list(always))))
    return sorted(order_V[:size].tolist())
