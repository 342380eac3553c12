"""Documents of random tokens, and text of random words."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_train.data.tokenize import Document
from tiny import VOCAB_SIZE


def random_documents(
    lengths: Sequence[int], *, seed: int = 0, prompt_tokens: int = 0, tokens: Tensor | None = None
) -> list[Document]:
    """Return documents in groups of their own, of all tokens or of some; the tokens of their prompts are no targets."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.arange(VOCAB_SIZE) if tokens is None else tokens
    return [
        Document(
            choice[torch.randint(len(choice), (length,), generator=generator)].tolist(),
            [index >= prompt_tokens for index in range(length)],
            f"g{number}",
            str(number),
        )
        for number, length in enumerate(lengths)
    ]


def sentence(seed: str) -> str:
    """Return six random words, by which a prompt is no near-duplicate of another."""
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefghij", k=5)) for _ in range(6))
