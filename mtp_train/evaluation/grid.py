"""The grid of settings that ``evaluate``, ``compare`` and studies measure, and the prompts of its suite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_train.evaluation.decoding import DecodingOptions
from mtp_train.evaluation.prompt_records import Rule, Setting, TaskPrompt
from mtp_train.evaluation.suites import load_suite, suite_prompts


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings to measure and the prompts to measure them on."""

    suite: str
    tasks: tuple[str, ...] | None
    """None: all tasks of the suite."""
    prompts_per_task: int
    temperatures: tuple[float, ...]
    contexts: tuple[int | None, ...]
    """Lengths that prompts are extended to; None leaves them as they are."""
    depths: tuple[int, ...]
    rules: tuple[Rule, ...]
    """``greedy`` applies at temperature 0, the others above it."""
    max_new_tokens: int
    batch: int
    """Prompts decoded together."""
    seed: int

    def drafted(self, temperature: float, context_tokens: int | None) -> list[Setting]:
        """Return the settings with drafts at one temperature and context."""
        rules = [rule for rule in self.rules if (rule == "greedy") == (temperature == 0.0)]
        return [Setting(temperature, context_tokens, depth, rule) for rule in rules for depth in self.depths]

    def settings(self) -> list[Setting]:
        """Return every setting with drafts."""
        return [one for context in self.contexts for t in self.temperatures for one in self.drafted(t, context)]

    @property
    def headline(self) -> Setting:
        """The setting of the report's table of arms: the lowest temperature, prompts as they are, depth 3."""
        context = None if None in self.contexts else min(one for one in self.contexts if one is not None)
        depth = max((one for one in self.depths if one <= 3), default=min(self.depths))
        settings = self.drafted(min(self.temperatures), context)
        return next(one for one in reversed(settings) if one.depth == depth)

    def options(self, eos_ids: Collection[int]) -> DecodingOptions:
        """Return what the engine needs besides settings and prompts."""
        return DecodingOptions(max_new_tokens=self.max_new_tokens, eos_ids=eos_ids, seed=self.seed, batch=self.batch)


def grid_prompts(grid: Grid, tokenizer: Any, contexts: Sequence[int | None]) -> dict[int | None, list[TaskPrompt]]:
    """Return the prompts of the grid's suite, by the length that they are extended to.

    Raises:
        DataError: The suite or a task does not exist, or the suite cannot be read.
    """
    suite = load_suite(grid.suite)
    return {
        context: suite_prompts(
            suite,
            tokenizer,
            context_tokens=context,
            prompts_per_task=grid.prompts_per_task,
            seed=grid.seed,
            tasks=grid.tasks,
        )
        for context in contexts
    }
