"""What decoding counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mtp_train.acceptance import PromptCounts


class Round(NamedTuple):
    """One draft, verify, accept, commit."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """New tokens of one prompt and how they came about.

    The first token comes from prefill, outside any round. Each round drafts exactly ``depth`` tokens, unless the
    request left the depth to the decoder. Accepted tokens past EOS or past the limit are counted and not returned, so
    that ``1 + rounds + num_accepted_tokens`` may exceed ``len(token_ids)``.
    """

    token_ids: tuple[int, ...]
    """New tokens only; ends with EOS where EOS ended it."""
    text: str = ""
    """Its text, cut before a stop string that ended it; empty without a tokenizer."""
    finish_reason: Literal["stop", "length"] = "length"
    """``stop``: a stop token or a stop string ended it."""
    rounds: int
    num_draft_tokens: int
    accepted_per_pos: tuple[int, ...]
    """Rounds in which at least ``i + 1`` drafts were accepted, one entry per depth; empty for plain decoding."""
    round_log: tuple[Round, ...]
    """Every round, in order."""
    seconds_prefill: float
    """Wall time until the first token was known."""
    seconds_decode: float
    """Wall time of all rounds. The head reads the prompt in the first of them."""

    @property
    def num_drafts(self) -> int:
        """The rounds, under the name that engines give them in their counters."""
        return self.rounds

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts, bonus tokens excluded."""
        return sum(self.accepted_per_pos)

    def counts(self, prompt_id: str, group: str) -> PromptCounts:
        """Return what the statistics pool over prompts; its ``seconds`` are prefill and rounds together.

        Args:
            prompt_id: Name of the prompt, the same for every arm.
            group: What the prompt is held out with. Intervals leave out whole groups; a prompt of which nothing else is
                known is a group of its own.
        """
        return PromptCounts(
            prompt_id=prompt_id,
            rounds=self.rounds,
            num_draft_tokens=self.num_draft_tokens,
            accepted_per_pos=self.accepted_per_pos,
            new_tokens=len(self.token_ids),
            seconds=self.seconds_prefill + self.seconds_decode,
            group=group,
        )


def accepted_per_pos(rounds: Sequence[Round], depth: int) -> tuple[int, ...]:
    """Count, for each of ``depth`` positions, the rounds that accepted it."""
    return tuple(sum(one.num_accepted > position for one in rounds) for position in range(depth))
