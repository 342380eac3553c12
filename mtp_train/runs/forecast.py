"""How long a run takes in all, from the rates that its stages have had so far.

Work is counted in units whose seconds a machine repeats: tokens of training steps, and rounds of decoding. The rate of
training is not known before its first steps. Answers give the rate of rounds and the length of texts, for the
measurements and for later answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.evaluation.decoding import MAX_BATCH, SPEED_PASSES, SPEED_PROMPTS, SPEED_TOKENS
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.settings import measured_tokens, run_settings

SETTLED_SECONDS = 5.0
"""A stage's own rate counts after so many seconds of it."""
MOVED = 1.25
"""A forecast that moves by this factor is printed again."""
LONG = 0.7
"""Texts of this part of their limit on average may be longer without it."""
CPU_ROWS = 16
"""A CPU takes twice as long for a round of so many more rows; a GPU takes as long as for one row."""


class Stage(NamedTuple):
    """A stage of a run, and the units of work that are planned for it."""

    name: str
    rate: str
    """Stages of one rate take the same seconds per unit."""
    work: float = 0.0
    per_token: float = 0.0
    """Units of further work for each token of a text."""
    most_tokens: int = 0
    """Limit of a text."""
    texts: int = 1


class Forecast:
    """The time of the stages of a run, or of a probe and the rescue after it; without stages it prints nothing."""

    def __init__(
        self,
        stages: Sequence[Stage] = (),
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stages, self._console, self._clock = stages, console or Console(quiet=True), clock
        self.rates: dict[str, float] = {}
        """Seconds of a unit."""
        self.number = -1
        """Of the present stage, from 0."""
        self.text_tokens = math.inf
        """The mean length of texts without a limit."""
        self._begun = clock()
        self._forget()

    def _forget(self) -> None:
        self._said = 0.0
        self._left: float | None = None
        self._first: tuple[float, float] | None = None

    def begin(self, name: str) -> None:
        """Begin the next stage of a name; those before it were done by an earlier start, or are not needed."""
        names = [stage.name for stage in self.stages]
        if name in names[self.number + 1 :]:
            self.number = names.index(name, self.number + 1)
            self._forget()
            self._tell()

    def update(self, done: float, left: float) -> None:
        """Take the units that the stage has done, and those left. The time before the first call is not in its rate."""
        now = self._clock()
        self._left = left
        self._first = self._first or (now, done)
        seconds = now - self._first[0]
        units = done - self._first[1]
        if self.number >= 0 and units and seconds >= SETTLED_SECONDS:
            self.rates[self.stages[self.number].rate] = seconds / units
            self._tell()

    def wrote(self, tokens: int, texts: int, left: int, processes: int) -> None:
        """Take the tokens of all texts that a process has written in this stage, and the number of texts left to it."""
        if self.number >= 0:
            stage = self.stages[self.number]
            mean = tokens / texts
            self.text_tokens = mean if mean < LONG * stage.most_tokens else math.inf
            unit = processes * stage.per_token / stage.texts
            self.update(unit * tokens, unit * mean * left)

    def _tell(self) -> None:
        """Print the time of all stages, besides those of an unknown rate, unless it is near the time printed last."""
        seconds = self._clock() - self._begun
        unknown = dict[str, None]()
        for number, stage in enumerate(self.stages[self.number :]):
            work = stage.work + stage.per_token * min(stage.most_tokens, self.text_tokens)
            if stage.rate in self.rates:
                seconds += self.rates[stage.rate] * (work if number or self._left is None else self._left)
            else:
                unknown[stage.name] = None
        present = self.stages[self.number]
        told = f"stage {self.number + 1} of {len(self.stages)}, {present.name}"
        if present.name not in unknown:
            if self._said / MOVED < seconds < self._said * MOVED:
                return
            self._said = seconds
            told += f": about {duration(seconds)} in all{', besides ' * bool(unknown)}{' and '.join(unknown)}"
        self._console.print(told)


def duration(seconds: float) -> str:
    if seconds < 100.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000.0 else f"{seconds / 3600:.1f} h"


def round_units(rows: int, device: str) -> float:
    """Return the units of a round of decoding of so many rows."""
    return 1.0 if device == "cuda" else 1.0 + rows / CPU_ROWS


def training_units(recipe: Recipe) -> float:
    """Return the tokens of all steps, and of what selects the best head."""
    return recipe.train.max_steps * recipe.train.tokens_per_step + math.prod(measured_tokens(recipe))


def stages_of(recipe: Recipe, trunk: Checkpoint, device: str) -> list[Stage]:
    """Return the stages of a recipe's run that take long, with their work; none of a study."""
    answered = recipe.data.regenerate
    asked = recipe.evaluate
    found = [Stage("training", "training", training_units(recipe))]
    if answered is not None:
        rows = answered.batch_size or MAX_BATCH
        texts = answered.max_prompts or 1
        unit = round_units(rows, device) / rows
        by_decoder = Stage("answering", "decoding", 0.0, texts * unit, answered.max_new_tokens, texts)
        found.insert(0, Stage("answering", "serving", texts) if answered.endpoint else by_decoder)
    if recipe.gate.enabled:
        lanes = len(asked.arms) * len(run_settings(recipe, trunk))
        timed = lanes * SPEED_PROMPTS * SPEED_PASSES * SPEED_TOKENS * round_units(1, device)
        batches = lanes * asked.prompts / MAX_BATCH * round_units(MAX_BATCH, device)
        found.append(Stage("measuring", "decoding", timed, batches, asked.max_new_tokens))
    return [] if recipe.study is not None else found
