"""Drafters without an MTP head, for comparison: a smaller language model, and prompt lookup.

Shapes: B rows of the batch, R rows that start together, T tokens of a window, S positions, K drafts, D hidden,
V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.delta import MAX_WINDOW
from mtp_inference.cache.model_cache import PREFILL_CHUNK, WindowCache, prefill_chunks, window_states
from mtp_inference.cache.window import Window
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, Pending, RoundPlan, state_at
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.errors import MtpError
from mtp_train.trunk.load import Trunk

LONGEST_MATCH = 3
"""Largest number of last tokens that prompt lookup searches for."""


class ModelDrafting(Drafting):
    """Draft with a smaller model that shares the trunk's tokenizer (Leviathan et al., arXiv:2211.17192).

    Args:
        model: The draft model, on the trunk's device.

    Example:
        >>> from mtp_inference import ModelDrafting, SpeculativeDecoder
        >>> model = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> target = SpeculativeDecoder.from_pretrained("demo:finetune", depth=0, device="cpu").trunk
        >>> decoder = SpeculativeDecoder(target, ModelDrafting(model), depth=2, eos_ids=())
        >>> decoder.generate([[4, 5, 6]], max_new_tokens=8)[0].num_drafts > 0
        True
    """

    def __init__(self, model: Trunk) -> None:
        self.model = model

    def check(self, trunk: Trunk, depth: int) -> None:
        ours, theirs = self.model.lm_head_VD.shape[0], trunk.lm_head_VD.shape[0]
        if ours != theirs:
            raise MtpError(
                f"draft model: a vocabulary of {ours} tokens; expected the trunk's {theirs}. Use a draft model of the "
                "same tokenizer."
            )

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return ModelDrafter(self.model, size)


class ModelDrafter(Drafter):
    """Run the draft model over the committed tokens, then draft token by token."""

    def __init__(self, model: Trunk, size: BatchSize) -> None:
        self.model = model
        self.depth = size.depth
        self.cache = WindowCache(
            model.config,
            num_rows=size.num_rows,
            # Drafts and rejected tokens are written past the trunk's last position.
            capacity=size.capacity + size.num_pending + size.depth,
            max_window=max(PREFILL_CHUNK, size.num_pending),
        )
        self.pending = Pending(size, model.lm_head_VD.device)

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        for _ in prefill_chunks(self.model, self.cache, rows, prompt_RT, PREFILL_CHUNK):
            pass
        self.pending.begin(rows, first_R, prompt_RT.shape[1])

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        self.pending.add(tokens_BT, num_kept_B)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        last_B = self.pending.last(plan)
        hidden_BTD = self._read_pending(plan)
        if plan.depth == 0:
            return choice.result()
        after_pending = self.cache.recurrent.snapshot()
        choice.add(self.model.logits(state_at(hidden_BTD, last_B)))
        for ahead in range(plan.depth - 1):
            hidden_BTD = self._run(choice.last_B1, (self.pending.first_B + ahead)[:, None], plan)
            self.cache.commit(torch.ones_like(last_B))
            choice.add(self.model.logits(hidden_BTD))
        # Undo the drafts in the recurrent states.
        self.cache.recurrent.restore(after_pending)
        return choice.result()

    def _read_pending(self, plan: RoundPlan) -> Tensor:
        positions_BP = self.pending.positions(plan.pending + 1)
        hidden: list[Tensor] = []
        for start in range(0, plan.pending, MAX_WINDOW):
            # After the first window, at least two tokens: some rows may keep none, and a window of one token is always
            # kept.
            end = max(min(start + MAX_WINDOW, plan.pending), min(start, 1) * (start + 2))
            part = slice(start, end)
            hidden.append(self._run(self.pending.tokens_BP[:, part], positions_BP[:, part], plan))
            self.cache.commit(self.pending.num_B - start)
        self.pending.clear()
        return torch.cat(hidden, dim=1)

    def _run(self, tokens_BT: Tensor, positions_BT: Tensor, plan: RoundPlan) -> Tensor:
        used = plan.used + self.depth
        # An inactive row may be at a position beyond all others, outside the keys in use.
        window = Window(slice(0, len(tokens_BT)), positions_BT.clamp(max=used - 1), used)
        return window_states(self.model, self.cache, tokens_BT, window)


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
        places_BT = self.length_B[:, None] + torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
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
