"""What a study keeps of every prompt that was decoded: enough to compute each of its figures again.

Lines of JSON, one a prompt, in one file an arm and setting: a study that was interrupted goes on behind the last whole
line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from mtp_train.acceptance import PromptCounts
from mtp_train.data.prompts import Prompt
from mtp_train.errors import DataError

Rule = Literal["none", "greedy", "argmax", "sampled"]
"""How drafts are made and verified. ``none``: no drafts. ``greedy``: temperature 0, the longest prefix equal to the
trunk's own choices. Above 0, ``argmax``: the head's first choice, kept with the trunk's probability of it; ``sampled``:
drawn from the head's distribution, verified by rejection sampling."""


@dataclass(frozen=True, order=True)
class Setting:
    """One point of the grid; the arm and the task come besides."""

    temperature: float
    context_tokens: int | None
    """Length every prompt is brought to with text before it; None leaves prompts as they are."""
    depth: int
    """Drafts per round; 0 with rule ``none``."""
    rule: Rule

    @property
    def plain(self) -> Setting:
        """Return the same without drafts: what its speed and its texts are compared with."""
        return Setting(self.temperature, self.context_tokens, 0, "none")

    @property
    def slug(self) -> str:
        """Name the setting in file names."""
        context = "own" if self.context_tokens is None else str(self.context_tokens)
        return f"t{self.temperature:g}-c{context}-k{self.depth}-{self.rule}"


@dataclass(frozen=True, kw_only=True)
class TaskPrompt(Prompt):
    """A prompt and the task it belongs to."""

    task: str


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One prompt, decoded by one arm under one setting."""

    prompt_id: str
    group: str
    """What the prompt is held out with: intervals leave out whole groups."""
    task: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    """New tokens."""
    drafted: tuple[int, ...]
    """Drafts of each round, in order: the depth, or fewer where a drafter had nothing to say."""
    accepted: tuple[int, ...]
    """Accepted drafts of each round. Round r begins with ``1 + r + sum(accepted[:r])`` new tokens committed."""
    seconds_prefill: float
    """Wall time until the first token; in a batch, that of the batch."""
    seconds_decode: float
    """Wall time of the rounds; in a batch, this prompt's equal share of the batch's."""
    same_as_plain: Literal["identical", "near_tie", "divergence"] | None
    """How its tokens compare with plain decoding of the same seed; None where they need not be equal (rule ``sampled``)
    and for plain decoding itself."""

    def counts(self, depth: int) -> PromptCounts:
        """Return what the statistics of ``mtp_train.acceptance`` pool over prompts."""
        return PromptCounts(
            prompt_id=self.prompt_id,
            rounds=len(self.accepted),
            num_draft_tokens=sum(self.drafted),
            accepted_per_pos=tuple(sum(one > position for one in self.accepted) for position in range(depth)),
            new_tokens=len(self.token_ids),
            seconds=self.seconds_prefill + self.seconds_decode,
            group=self.group,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Decoded:
        """Read back what :meth:`to_json` returned.

        Raises:
            DataError: Another version wrote it.
        """
        names = {field.name for field in fields(cls)}
        if raw.keys() != names:
            raise DataError(
                f"a measured prompt: fields missing or unknown: {', '.join(sorted(names ^ raw.keys()))}; expected "
                "those of this version. Measure into another directory, or go on with the version that wrote this one."
            )
        make: Callable[..., Decoded] = cls
        return make(**{key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()})
