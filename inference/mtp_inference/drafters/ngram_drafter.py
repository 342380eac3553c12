"""Draft by prompt lookup, without a model, for comparison.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, S positions, K drafts, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.rows import places_from
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.trunk.load import Trunk

LONGEST_MATCH = 3
"""Largest number of last tokens that prompt lookup searches for."""


class NgramDrafting(Drafting):
    """Draft by prompt lookup: repeat the tokens that followed the previous occurrence of the last tokens.

    The longest match of up to :data:`LONGEST_MATCH` tokens counts. A text whose last token occurs nowhere before drafts
    nothing.

    Example:
        >>> from mtp_inference import NgramDrafting, SpeculativeDecoder
        >>> target = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> decoder = SpeculativeDecoder(target, NgramDrafting(), depth=3, eos_ids=())
        >>> decoder.generate([[4, 5, 4]], max_new_tokens=8)[0].num_drafts > 0
        True
    """

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return NgramDrafter(size, trunk.lm_head_VD.device)


class NgramDrafter(Drafter):
    """Store every text on the device and search it there. No tokens are pending."""

    def __init__(self, size: BatchSize, device: torch.device) -> None:
        shape = (size.num_rows, size.capacity + size.depth + 1)
        self.text_BS = torch.zeros(shape, dtype=torch.long, device=device)
        self.length_B = torch.zeros(size.num_rows, dtype=torch.long, device=device)

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        num_tokens = prompt_RT.shape[1]
        self.text_BS[rows, :num_tokens] = prompt_RT
        self.text_BS[rows, num_tokens] = first_R
        self.length_B[rows] = num_tokens + 1

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        places_BT = places_from(self.length_B, tokens_BT.shape[1])
        self.text_BS.scatter_(1, places_BT, tokens_BT)
        self.length_B += num_kept_B

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        """A row without an earlier occurrence of its last tokens drafts nothing."""
        end_B = torch.full_like(self.length_B, -1)
        for num_tokens in range(1, LONGEST_MATCH + 1):
            found_B = self._last_end(num_tokens)
            end_B = torch.where(found_B >= 0, found_B, end_B)
        ahead_K = torch.arange(1, plan.depth + 1, device=end_B.device)
        tokens_BK = self.text_BS.gather(1, end_B[:, None] + ahead_K)
        num_known_B = (self.length_B - 1 - end_B).clamp(0, plan.depth)
        return Drafts(tokens_BK, num_drafted_B=num_known_B * (end_B >= 0))

    def _last_end(self, num_tokens: int) -> Tensor:
        """Return the index where the last ``num_tokens`` tokens ended before, int64 (B,); -1 if they did not occur."""
        places_S = torch.arange(self.text_BS.shape[1], device=self.text_BS.device)
        is_end_BS = (places_S >= num_tokens - 1) & (places_S < self.length_B[:, None] - 1)
        for back in range(num_tokens):
            wanted_B1 = self.text_BS.gather(1, (self.length_B[:, None] - 1 - back).clamp(min=0))
            is_end_BS &= self.text_BS.roll(back, dims=1) == wanted_B1
        return (places_S * is_end_BS - (~is_end_BS).long()).amax(dim=1)
