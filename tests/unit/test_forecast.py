"""The time in advance, on a scripted clock: right within a factor of two from the second stage on."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console

from mtp_train.answers.generate import PROMPTS_PER_ROW
from mtp_train.checkpoints.locations import open_location
from mtp_train.evaluation.decoding import BATCHES_AT_A_TIME, MAX_BATCH
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.forecast import Forecast, Stage, duration, stages_of, training_units

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Machine:
    """A clock that a simulated run moves, and the seconds of what the run does."""

    def __init__(self, seconds_of_row: float, seconds_of_round: float, tokens_per_second: float) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.of_row, self.of_round, self.speed = seconds_of_row, seconds_of_round, tokens_per_second

    def __call__(self) -> float:
        return self.now

    def decode(self, rows: int) -> None:
        self.now += self.of_round + rows * self.of_row

    @property
    def said(self) -> list[str]:
        return self.file.getvalue().splitlines()


def lengths(mean: int, limit: int) -> Iterator[int]:
    drawn = random.Random(0)
    while True:
        yield min(1 + round(drawn.expovariate(1 / mean)), limit)


def answer(machine: Machine, forecast: Forecast, recipe: Recipe, mean: int) -> None:
    spec = recipe.data.regenerate
    assert spec is not None
    forecast.begin("answering")
    rows = spec.batch_size or MAX_BATCH
    left = spec.max_prompts or 0
    drawn, answered, tokens = lengths(mean, spec.max_new_tokens), 0, 0
    forecast.update(0.0, math.inf)
    while left:
        batch = sorted(next(drawn) for _ in range(min(left, PROMPTS_PER_ROW * rows)))
        left, answered, tokens = left - len(batch), answered + len(batch), tokens + sum(batch)
        # A row whose text ends takes the next one.
        for number in range(math.ceil(sum(batch) / rows)):
            machine.decode(min(rows, sum(batch) - number * rows))
        forecast.wrote(tokens, answered, left, 1)


def train(machine: Machine, forecast: Forecast, recipe: Recipe) -> None:
    # The trunk is loaded anew.
    forecast.begin("training")
    machine.now += 20.0
    units = training_units(recipe)
    for step in range(1, recipe.train.max_steps + 1):
        machine.now += recipe.train.tokens_per_step / machine.speed
        done = step / recipe.train.max_steps
        forecast.update(done * units, (1.0 - done) * units)


def measure(machine: Machine, forecast: Forecast, recipe: Recipe, mean: int) -> None:
    forecast.begin("measuring")
    drawn = lengths(mean, recipe.evaluate.max_new_tokens)
    for _ in recipe.evaluate.arms:
        for _ in range(math.ceil(recipe.evaluate.prompts / (BATCHES_AT_A_TIME * MAX_BATCH))):
            texts = [next(drawn) for _ in range(BATCHES_AT_A_TIME * MAX_BATCH)]
            for _ in range(max(*texts, sum(texts) // MAX_BATCH)):
                machine.decode(MAX_BATCH)
        for _ in range(8 * 3 * 16):
            machine.decode(1)


def totals(said: list[str]) -> list[float]:
    """Return the seconds of all stages that each line says, as far as it says any."""
    found = [re.search(r"about ([\d.]+) (\w+) in all$", line) for line in said]
    return [float(one[1]) * UNITS[one[2]] for one in found if one is not None]


@pytest.mark.parametrize("mean", [60, 900])
@pytest.mark.parametrize(
    ("device", "speeds"),
    [("cuda", (0.0001, 0.025, 8000.0)), ("cpu", (0.02, 0.2, 4000.0)), ("cpu", (0.008, 0.2, 1000.0))],
    ids=["GPU", "CPU", "another CPU"],
)
def test_a_run_is_forecast_within_a_factor_of_two(device: str, speeds: Sequence[float], mean: int) -> None:
    machine = Machine(*speeds)
    changes = ["data.regenerate.max_prompts=300", "data.regenerate.max_new_tokens=1024", "train.max_steps=8"]
    changes += ["data.regenerate.batch_size=64", "data.seq_len_tokens=2048", "train.tokens_per_step=8192"]
    recipe = load_recipe("retrain_head", [*changes, "evaluate.max_new_tokens=256", "evaluate.prompts=128"])
    forecast = Forecast(
        stages_of(recipe, open_location(recipe.model.trunk), device), Console(file=machine.file, width=200), machine
    )
    answer(machine, forecast, recipe, mean)
    before = len(machine.said)
    assert not totals(machine.said), "the speed of training is not known"
    train(machine, forecast, recipe)
    measure(machine, forecast, recipe, mean)
    found = totals(machine.said[before:])
    assert [line.partition(":")[0] for line in machine.said[before:]] == [
        *["stage 2 of 3, training"] * (1 + len(found) - 1),
        "stage 3 of 3, measuring",
    ]
    assert len(found) >= 2
    assert all(0.5 <= one / machine.now <= 2.0 for one in found), (found, machine.now)


def test_a_forecast_is_corrected_as_it_goes_and_not_at_every_step() -> None:
    machine = Machine(0.0, 0.0, 0.0)
    forecast = Forecast([Stage("training", "training", 60.0)], Console(file=machine.file), machine)
    forecast.begin("training")
    for done in range(61):
        # The first steps tell little.
        machine.now += 4.0 if done == 1 else 1.0 if done < 30 else 5.0
        forecast.update(done, 60.0 - done)
    found = totals(machine.said)
    assert found[0] == 180.0, "6 s and 58 steps of 2.5 s, in minutes; after the first step, 241 s"
    assert 120.0 <= found[-1] <= machine.now == 188.0
    assert 2 <= len(found) <= 6


def test_a_rescue_counts_the_stages_of_its_probe_and_begins_with_its_rates() -> None:
    machine = Machine(0.0, 0.0, 0.0)
    run = [Stage("answering", "decoding", 25.0), Stage("training", "training", 10.0)]
    forecast = Forecast([Stage("comparing", "comparing"), *run, *run], Console(file=machine.file), machine)
    forecast.begin("comparing")
    forecast.begin("measuring")
    for name, units in (("answering", 25), ("training", 10)):
        forecast.begin(name)
        for done in range(units + 1):
            machine.now += 1.0
            forecast.update(done, units - done)
    # The training of the probe was needed and is done; an earlier start had made these answers.
    forecast.begin("training")
    assert machine.said == [
        "stage 1 of 5, comparing",
        "stage 2 of 5, answering",
        "stage 2 of 5, answering: about 51 s in all, besides training",
        "stage 3 of 5, training",
        "stage 3 of 5, training: about 72 s in all",
        "stage 5 of 5, training: about 47 s in all",
    ]


def test_durations_are_as_a_person_says_them() -> None:
    assert [duration(one) for one in (0.4, 89.0, 101.0, 2400.0, 6000.0, 90_000.0)] == [
        *("0 s", "89 s", "2 min", "40 min", "1.7 h", "25.0 h")
    ]
