"""The table that every report is computed from: one record per prompt, arm and setting.

A run keeps its records in memory. A study writes them as lines of JSON, one file per arm and setting, so that an
interrupted study resumes after the last complete line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ConfigDict

from mtp_inference import Request, TextCheck
from mtp_inference.sampling.distributions import Sampling
from mtp_train.acceptance.counts import PromptCounts
from mtp_train.answers.generate import noise_seed
from mtp_train.data.tokenize import Prompt

Rule = Literal["none", "greedy", "argmax", "sampled", "served"]
"""How drafts are made and verified.

- ``none``: no drafts.
- ``greedy``: temperature 0; a round accepts the longest prefix of the drafts that equals the trunk's argmax tokens.
- ``argmax``: above temperature 0, the head's argmax token, accepted with the trunk's probability of it.
- ``sampled``: above temperature 0, drawn from the head's distribution and verified by rejection sampling.
- ``served``: above temperature 0, by the rule of the server that decodes, which it does not report.
"""


class Exact:
    """Base of records that are read only with exactly their fields."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, order=True)
class Setting:
    """How prompts are sampled, drafted and verified: one point of a grid, without arm and task."""

    temperature: float
    context_tokens: int | None
    """Length that every prompt is extended to by text before it; None leaves prompts as they are."""
    depth: int
    """Drafts per round; 0 with rule ``none``."""
    rule: Rule
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""

    @property
    def plain(self) -> Setting:
        """Return the setting without drafts, whose speed and texts drafting arms are compared with."""
        return replace(self.setting, depth=0, rule="none")

    @property
    def setting(self) -> Setting:
        return Setting(self.temperature, self.context_tokens, self.depth, self.rule, self.top_p, self.top_k)

    @property
    def name(self) -> str:
        """Name the setting in reports; filters that are off are left out."""
        if not self.temperature:
            return "greedy"
        filters = (f", top-p {self.top_p:g}" if self.top_p < 1.0 else "") + (
            f", top-k {self.top_k}" if self.top_k else ""
        )
        return f"temperature {self.temperature:g}{filters}, {self.rule} drafts"

    def sampling(self, seed: int) -> Sampling:
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed)

    def request(self, prompt: Prompt, max_new_tokens: int, seed: int) -> Request:
        """Return the request for a prompt, whose noise depends on the seed and the prompt's id."""
        return Request(
            prompt_ids=prompt.prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=self.sampling(noise_seed(prompt.id, seed)),
        )

    @property
    def slug(self) -> str:
        context = "own" if self.context_tokens is None else str(self.context_tokens)
        filters = (f"-p{self.top_p:g}" if self.top_p < 1.0 else "") + (f"-n{self.top_k}" if self.top_k else "")
        return f"t{self.temperature:g}-c{context}-k{self.depth}-{self.rule}{filters}"


@dataclass(frozen=True, kw_only=True)
class PromptRecord(Exact):
    """One prompt, decoded by one arm under one setting."""

    prompt_id: str
    group: str
    """Group of the prompt; intervals leave out whole groups."""
    task: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    """Drafts of each round, in order: the depth, or fewer where the drafter proposed fewer."""
    accepted: tuple[int, ...]
    """Accepted drafts of each round. Before round r, ``1 + r + sum(accepted[:r])`` new tokens are committed."""
    seconds_prefill: float | None = None
    """Wall time until the first token. None for a prompt that was decoded in a batch: rows of a batch have no times of
    their own."""
    seconds_decode: float | None = None
    """Wall time of the rest."""
    check: TextCheck | None = None
    """Whether the text is the one that the rule and the trunk give. None for timed records and served texts."""

    @property
    def from_drafts(self) -> tuple[bool, ...]:
        """Return for each new token whether it was an accepted draft; the others are the trunk's own."""
        rounds = [flag for accepted in self.accepted for flag in (*[True] * accepted, False)]
        return (False, *rounds)[: len(self.token_ids)]

    def counts(self, depth: int) -> PromptCounts:
        """Return the counts that the statistics of ``mtp_train.acceptance`` pool over prompts."""
        return PromptCounts(
            prompt_id=self.prompt_id,
            rounds=len(self.accepted),
            num_draft_tokens=sum(self.drafted),
            accepted_per_pos=tuple(sum(one > position for one in self.accepted) for position in range(depth)),
            new_tokens=len(self.token_ids),
            group=self.group,
            seconds_prefill=self.seconds_prefill,
            seconds_decode=self.seconds_decode,
        )
