"""The settings that are measured, by a grid or by what a run's trunk is served with, and the prompts of a suite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtp_inference import MAX_DEPTH
from mtp_train.checkpoints.demo import PREFIX
from mtp_train.checkpoints.files import GENERATION_CONFIG_FILE, Checkpoint, read_json
from mtp_train.checkpoints.tokenizer import require_variables
from mtp_train.data.tokenize import Prompt, template_notes
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import ArmSpec, open_arm
from mtp_train.evaluation.decoding import MAX_BATCH
from mtp_train.evaluation.prompt_records import Rule, Setting
from mtp_train.evaluation.suites import load_suite, suite_prompts

logger = logging.getLogger(__name__)

AUTO = "auto"
DEPTHS = (1, 2, 3, 5)
RULES: tuple[Rule, ...] = ("greedy", "argmax", "sampled")
LEFT_OUT = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings of a generation config that no arm is measured with, and the values that switch them off."""


@dataclass(frozen=True, kw_only=True)
class EvaluationGrid:
    """The settings that :func:`evaluate` and :func:`compare` measure: every combination of the values below.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.EvaluationGrid(temperatures=[0.0, 0.6], contexts=[None, 8192], depths=[3])
    """

    suite: str = AUTO
    """``builtin``, ``demo``, ``mt-bench:LOC``, ``spec-bench:LOC``, ``speed-bench:LOC``, ``humaneval:LOC``,
    ``gsm8k:LOC``, or a file of prompts. ``auto``: ``demo`` for the demo's trunks, else ``builtin``."""
    columns: Mapping[str, str] | None = None
    """Names of columns in a file of prompts, by those that ``data.sources`` reads: ``{"instruction": "question"}``."""
    tasks: Sequence[str] | None = None
    prompts_per_task: int = 8
    temperatures: Sequence[float] = (0.0, 1.0)
    contexts: Sequence[int | None] = (None,)
    """Prompt lengths in tokens, reached by other text before the prompt; None leaves prompts as they are."""
    depths: Sequence[int] | None = None
    """Draft tokens per round, 1 to 7; None for 1, 2, 3 and 5 as far as the heads of all arms can draft."""
    rules: Sequence[Rule] = RULES
    """``greedy`` applies at temperature 0; above it, ``argmax`` drafts, or ``sampled`` drafts with rejection."""
    max_new_tokens: int = 128
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables for the chat template, as the trunk is served: ``{"enable_thinking": False}``. A record's own win. None
    for those of the arms' recipes."""
    batch: int = MAX_BATCH
    """Most prompts decoded together, for acceptance. Speed is measured on 8 prompts, one at a time."""
    seed: int = 0

    def settled(self, arms: Sequence[ArmSpec], trunks: Sequence[str]) -> EvaluationGrid:
        """Return the grid with values in range and without repeats, suite and depths chosen for the arms."""
        # The demo's trunks were trained on two kinds of text and can write nothing else.
        suite = "demo" if all(trunk.startswith(PREFIX) for trunk in trunks) else "builtin"
        opened = [open_arm(arm) for arm in arms]
        depths = self.depths
        if depths is None:
            deepest = min((one.deepest for one in opened), default=MAX_DEPTH)
            depths = [depth for depth in DEPTHS if depth <= deepest]
        grid = replace(
            self,
            suite=suite if self.suite == AUTO else self.suite,
            tasks=None if self.tasks is None else tuple(dict.fromkeys(self.tasks)),
            temperatures=tuple(dict.fromkeys(map(float, self.temperatures))),
            contexts=tuple(dict.fromkeys(self.contexts)),
            depths=tuple(dict.fromkeys(depths)),
            rules=tuple(dict.fromkeys(self.rules)),
        )
        require_grid(grid, min((one.most_drafts for one in opened), default=MAX_DEPTH))
        return grid

    def drafted(self, temperature: float, context_tokens: int | None) -> list[Setting]:
        rules = [rule for rule in self.rules if (rule == "greedy") == (temperature == 0.0)]
        return [Setting(temperature, context_tokens, depth, rule) for rule in rules for depth in self.depths or ()]

    def settings(self) -> list[Setting]:
        return [one for context in self.contexts for t in self.temperatures for one in self.drafted(t, context)]

    @property
    def headline(self) -> Setting:
        """The setting of the report's table of arms: the lowest temperature, prompts as they are, depth 3."""
        context = min(self.contexts, key=lambda one: one or 0)
        settings = self.drafted(min(self.temperatures), context)
        # Without depth 3, the next smaller one, else the smallest.
        return max(reversed(settings), key=lambda one: one.depth if one.depth <= 3 else -one.depth)


def require_grid(grid: EvaluationGrid, deepest: int) -> None:
    """Check the numbers of a grid.

    Raises:
        DataError: A number is out of range, or no setting is left.
    """
    contexts = [one for one in grid.contexts if one is not None]
    for flag, values, low, high, expected in (
        ("--depths", grid.depths or (), 1, deepest, f"1 to {deepest}"),
        ("--temperatures", grid.temperatures, 0.0, math.inf, "0 or more"),
        ("--contexts", contexts, 1, math.inf, "1 or more, or own"),
        ("--prompts-per-task", [grid.prompts_per_task], 1, math.inf, "1 or more"),
        ("--max-new-tokens", [grid.max_new_tokens], 2, math.inf, "2 or more, as the first token needs no round"),
        ("--batch", [grid.batch], 1, math.inf, "1 or more"),
    ):
        for value in values:
            if not low <= value <= high:
                raise DataError(f"{flag}: {value:g}; expected {expected}. Correct it, or leave the flag out.")
    for rule in grid.rules:
        if rule not in RULES:
            raise DataError(f"--rules: {rule!r}; expected {', '.join(RULES)}. Correct it.")
    for temperature in grid.temperatures:
        if not grid.drafted(temperature, None):
            wanted = "greedy" if temperature == 0.0 else "argmax or sampled"
            raise DataError(
                f"--rules: {' '.join(grid.rules)}, none of them for temperature {temperature:g}; expected {wanted}. "
                "Add it, or leave the temperature out."
            )


def grid_prompts(
    grid: EvaluationGrid, tokenizer: Any, contexts: Sequence[int | None]
) -> dict[int | None, list[Prompt]]:
    """Return the prompts of the grid's suite, by the length that they are extended to."""
    variables = grid.chat_template_kwargs or {}
    require_variables(tokenizer, variables, "--chat-template-kwargs")
    suite = load_suite(grid.suite, variables, grid.columns or {})
    for note in template_notes(suite, tokenizer):
        logger.warning("--suite %s: %s.", grid.suite, note)
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


def greedy(depth: int) -> Setting:
    return Setting(0.0, None, depth, "greedy")


def generation_settings(trunk: Checkpoint) -> Mapping[str, Any]:
    """Return the trunk's generation config without unset fields; empty where it does not sample."""
    path = trunk.path / GENERATION_CONFIG_FILE
    if not path.is_file():
        return {}
    found = {key: value for key, value in read_json(path).items() if value is not None}
    # transformers decodes greedily at temperature 0, whatever the value of do_sample.
    return found if found.get("do_sample") and found.get("temperature", 1.0) else {}


def left_out(trunk: Checkpoint) -> dict[str, Any]:
    """Return sampling settings of the trunk's generation config that engines apply and no arm is measured with."""
    served = generation_settings(trunk)
    return {name: served[name] for name, off in LEFT_OUT.items() if served.get(name, off) != off}
