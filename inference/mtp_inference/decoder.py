"""Greedy speculative decoding of one prompt: draft, verify, accept, commit.

Whatever the head drafts, the tokens are the trunk's own: verify runs the trunk over the last committed token and all
drafts at once, accept keeps the drafts that equal its choices, commit adds the trunk's choice after them and takes
back everything that the caches hold beyond. Plain decoding is the same loop with no drafts.

Shapes: B rows (1), T tokens, D hidden, K drafts (K1 = K + 1).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtp_inference.cache import RollbackCache
from mtp_inference.draft import Drafter, make_drafter
from mtp_inference.recurrent import per_token_states
from mtp_inference.stats import GenerationResult, Round, accepted_per_pos
from mtp_train.acceptance import accept_greedy
from mtp_train.errors import MtpError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk

MAX_DEPTH = 7


@dataclass
class DecodeState:
    """Where the decoding of one prompt stands between two rounds."""

    tokens: list[int]
    """Prompt and committed tokens. The trunk's cache holds all but the last."""
    num_prompt_tokens: int
    trunk_cache: RollbackCache
    drafter: Drafter | None
    """None where there is no head."""
    rounds: list[Round] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]


class SpeculativeDecoder:
    """Decode prompts greedily, ``depth`` drafts a round.

    The trunk and the head are used in the mode they are in: put both in ``eval()``.

    Args:
        trunk: The trunk, whose tokens count.
        head: The head, on the trunk's device; its dtype may differ. None decodes plainly, whatever the depth.
        depth: Drafts per round, 0 to 7; 0 decodes plainly.
        eos_ids: Tokens that end a text.

    Raises:
        MtpError: The depth is out of range.
        UnsupportedModelError: A chained head has fewer modules than ``depth``.
    """

    def __init__(self, trunk: Trunk, head: MtpHead | None, depth: int, eos_ids: Collection[int]) -> None:
        if not 0 <= depth <= MAX_DEPTH:
            raise MtpError(f"depth: {depth}; expected 0 to {MAX_DEPTH}. Use 3 unless you measured better.")
        self.trunk = trunk
        self.head = head if depth else None
        self.depth = depth if head is not None else 0
        self.eos_ids = frozenset(eos_ids)
        # A depth that the head cannot draft is refused here, not at the first prompt.
        self.new_drafter()

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> GenerationResult:
        """Decode one prompt until EOS or ``max_new_tokens`` new tokens.

        Args:
            prompt_ids: At least one token.
            max_new_tokens: At least 1.

        Raises:
            MtpError: The prompt is empty or no token is wanted.
        """
        if max_new_tokens < 1:
            raise MtpError(f"max_new_tokens: {max_new_tokens}; expected 1 or more. Ask for at least one token.")
        started = time.perf_counter()
        state = self.prefill(prompt_ids)
        prefilled = time.perf_counter()
        while len(state.new_tokens) < max_new_tokens and self.eos_ids.isdisjoint(state.new_tokens):
            self.run_round(state, self.depth)
        return GenerationResult(
            token_ids=tuple(self._until_eos(state.new_tokens[:max_new_tokens])),
            rounds=len(state.rounds),
            num_draft_tokens=sum(one.num_drafted for one in state.rounds),
            accepted_per_pos=accepted_per_pos(state.rounds, self.depth),
            seconds_prefill=prefilled - started,
            seconds_decode=time.perf_counter() - prefilled,
        )

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int]) -> DecodeState:
        """Run the trunk over the prompt and commit the first token.

        Raises:
            MtpError: The prompt is empty.
        """
        if not prompt_ids:
            raise MtpError("prompt: no token; expected at least one. Start it with the tokenizer's BOS token.")
        cache = RollbackCache(self.trunk.config)
        prompt_BT = self._tensor(prompt_ids)
        hidden_BTD = self.trunk.hidden(prompt_BT, cache=cache)
        first_B1 = self.trunk.logits(hidden_BTD[:, -1:]).argmax(dim=-1)
        cache.commit(num_rejected=0)
        drafter = self.new_drafter()
        if drafter is not None:
            drafter.extend(hidden_BTD, torch.cat([prompt_BT[:, 1:], first_B1], dim=1))
        return DecodeState([*prompt_ids, *first_B1[0].tolist()], len(prompt_ids), cache, drafter)

    @torch.inference_mode()
    def run_round(self, state: DecodeState, depth: int) -> None:
        """Run one round. The depth may change from round to round, up to the decoder's own."""
        drafts_BK = self._draft(state, depth)
        hidden_BTD, choices_BK1 = self._verify(state, drafts_BK)
        # The one moment of a round at which the host waits for the device.
        num_accepted, *choices = torch.cat([accept_greedy(drafts_BK, choices_BK1), choices_BK1[0]]).tolist()
        num_drafted, num_kept = drafts_BK.shape[1], num_accepted + 1
        state.trunk_cache.commit(num_rejected=num_drafted - num_accepted)
        if state.drafter is not None:
            state.drafter.extend(hidden_BTD[:, :num_kept], choices_BK1[:, :num_kept])
        # An accepted draft equals the trunk's choice, so that the committed tokens are all choices.
        state.tokens.extend(choices[:num_kept])
        state.rounds.append(Round(num_drafted, num_accepted))

    def new_drafter(self) -> Drafter | None:
        """Return a drafter for one prompt, None for plain decoding."""
        return None if self.head is None else make_drafter(self.trunk, self.head, self.depth)

    def _draft(self, state: DecodeState, depth: int) -> Tensor:
        if depth == 0 or state.drafter is None:
            return self._tensor([])
        return state.drafter.draft(depth)

    def _verify(self, state: DecodeState, drafts_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Run the trunk over the last token and the drafts; return hidden states (B, K1, D) and greedy choices."""
        window_BK1 = torch.cat([self._tensor(state.tokens[-1:]), drafts_BK], dim=1)
        with per_token_states(self.trunk.family):
            hidden_BTD = self.trunk.hidden(window_BK1, cache=state.trunk_cache)
        return hidden_BTD, self.trunk.logits(hidden_BTD).argmax(dim=-1)

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([tokens], dtype=torch.long, device=self.trunk.lm_head_VD.device)

    def _until_eos(self, tokens: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(tokens) if token in self.eos_ids]
        return tokens[: ends[0] + 1] if ends else tokens
