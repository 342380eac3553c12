"""Draft from a static n-gram table: a baseline for heads that shows the gain from repeated phrases alone.

Shapes: B rows of the batch, K drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan
from mtp_inference.drafters.ngram_drafter import NgramDrafter
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.data.tokenize import Document
from mtp_train.trunk.load import Trunk

LONGEST = 4
"""Tokens of context. On the demo, 2 give tau 2.32, 3 to 8 give 2.36 to 2.38, and 4 give the highest."""

Table = dict[tuple[int, ...], int]


def make_table(documents: Iterable[Document], longest: int = LONGEST) -> Table:
    """Return the most frequent target after every context of 1 to ``longest`` tokens; on a tie, the lowest token id."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for document in documents:
        tokens = document.input_ids.tolist()
        for index, is_target in enumerate(document.loss_mask.tolist()):
            for length in range(1, min(longest, index) + 1) if is_target else ():
                counts.setdefault(tuple(tokens[index - length : index]), Counter())[tokens[index]] += 1
    return {context: min(found, key=lambda token: (-found[token], token)) for context, found in counts.items()}


class TableDrafting(Drafting):
    """Draft the most frequent target of the longest known context.

    Args:
        table: Result of :func:`make_table`.
        longest: Length of its longest contexts.
    """

    def __init__(self, table: Table, longest: int = LONGEST) -> None:
        self.table = table
        self.longest = longest

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return TableDrafter(self, size, trunk.lm_head_VD.device)

    def next_token(self, text: Sequence[int]) -> int | None:
        """Return the token to draft after a text; None where the table has none of its contexts."""
        contexts = (tuple(text[-length:]) for length in range(min(self.longest, len(text)), 0, -1))
        return next((self.table[context] for context in contexts if context in self.table), None)


class TableDrafter(NgramDrafter):
    """Store every text like prompt lookup, and look up its last tokens in the table."""

    def __init__(self, maker: TableDrafting, size: BatchSize, device: torch.device) -> None:
        super().__init__(size, device)
        self.maker = maker

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        """A row without a known context drafts no further tokens."""
        tokens_BK = torch.zeros(len(self.length_B), plan.depth, dtype=torch.long)
        num_drafted_B = torch.zeros(len(self.length_B), dtype=torch.long)
        for row, length in enumerate(self.length_B.tolist()):
            text = self.text_BS[row, max(0, length - self.maker.longest) : length].tolist()
            for index in range(plan.depth):
                token = self.maker.next_token(text)
                if token is None:
                    break
                text.append(token)
                tokens_BK[row, index] = token
                num_drafted_B[row] += 1
        device = self.length_B.device
        return Drafts(tokens_BK.to(device), num_drafted_B=num_drafted_B.to(device))
