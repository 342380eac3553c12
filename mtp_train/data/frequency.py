"""The tokens that a head may draft: those that the training text is made of.

FR-Spec (arXiv:2502.14856) and FastMTP (arXiv:2509.18362): with a large vocabulary most of a draft's cost is
reading the output matrix, and few tokens make up most of a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

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
    counts = Counter(
        token
        for document in documents
        for token, is_target in zip(document.input_ids, document.loss_mask, strict=True)
        if is_target
    )
    ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
    return sorted(ranked[:size])


def keep_targets(documents: Sequence[Document], vocab: Collection[int]) -> list[Document]:
    """Return the documents with no targets but tokens of ``vocab``: others a head of that vocabulary cannot draft.

    Documents that are left without a target are left out.
    """
    kept = [
        replace(
            document,
            loss_mask=tuple(
                is_target and token in vocab
                for token, is_target in zip(document.input_ids, document.loss_mask, strict=True)
            ),
        )
        for document in documents
    ]
    return [document for document in kept if document.has_target()]
