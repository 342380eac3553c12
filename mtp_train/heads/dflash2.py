"""Run a DFlash 2 drafter: a DFlash drafter whose layers have convolutions, and a selector of the best tokens.

The selector adds a score to the best tokens of each row, computed from the state of the row and the token before its
draft. Other tokens are not drafted. As in the speculators package (``models/dflash2/model_definitions.py``).

Shapes: B rows, T tokens of a block, D hidden, R rank, C candidates, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.heads.dflash import Correct, DFlashHead


class CandidateSelector(nn.Module):
    """Score the best tokens of a row by the token before them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_candidates = config.selector_top_k
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits_B1V: Tensor, token_B1: Tensor, state_B1D: Tensor) -> Tensor:
        """Return the logits with the scores of the candidates added, (B, 1, V), minus infinity for other tokens."""
        best = logits_B1V.topk(self.num_candidates, dim=-1)
        context_B1R = self.predecessor_codebook[token_B1] * self.hidden_projection(state_B1D)
        scores_B1C = (self.successor_codebook[best.indices] @ context_B1R[..., None]).squeeze(-1)
        nothing = torch.full_like(logits_B1V, -torch.inf)
        return nothing.scatter(-1, best.indices, best.values + scores_B1C)


class DFlash2Head(DFlashHead):
    """A DFlash 2 drafter as a head."""

    def __init__(self, *shape: Any, **wiring: Any) -> None:
        super().__init__(*shape, **wiring)
        self.module.candidate_selector = CandidateSelector(self.config)

    def correcting(self, states_BTD: Tensor, anchor_B1: Tensor) -> Correct:
        select = self.module.candidate_selector
        return lambda row, logits_B1V, token_B1: select(logits_B1V, token_B1, states_BTD[:, row : row + 1])
