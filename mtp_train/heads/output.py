"""An output matrix of some tokens only.

Shapes: R of its tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OutputRows(nn.Module):
    """Logits of some tokens: the others get none, so that q is 0 there and verification stays exact.

    FR-Spec (arXiv:2502.14856), FastMTP (arXiv:2509.18362) and EAGLE-3: reading the whole output matrix is most of
    what a draft costs where the vocabulary is large.

    Args:
        weight_RD: Frozen.
        token_ids_R: int, the tokens of its rows; None where these are the vocabulary.
        vocab_size: V.
    """

    def __init__(self, weight_RD: Tensor, token_ids_R: Tensor | None, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_RD, requires_grad=False)
        ids = None if token_ids_R is None else token_ids_R.to(weight_RD.device, torch.long)
        self.token_ids_R: Tensor | None
        self.register_buffer("token_ids_R", ids, persistent=False)
        self.vocab_size = vocab_size

    def forward(self, state: Tensor) -> Tensor:
        """Return logits (..., V) of states (..., D), minus infinity where there are none."""
        logits = state @ self.weight.T
        if self.token_ids_R is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.token_ids_R] = logits
        return whole
