"""The time between two log lines is divided among the parts of a step, by a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from documents import random_documents
from mtp_train.data.pack import PackedSequence, pack_documents
from mtp_train.runs.settings import plan_of, train_options
from mtp_train.train import loop
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.log import STEP_PARTS, RunLog, read_metrics
from mtp_train.train.loop import LogSums, train_head
from mtp_train.train.step_timer import StepTimer
from mtp_train.trunk.states import TrunkStates
from runs import tiny_recipe
from tiny import tiny_head, tiny_trunk

STEPS, MICRO_BATCHES = 2, 2
COST = {"batch": 32.0, "states": 16.0, "forward": 8.0, "backward": 4.0, "optimiser": 2.0, "between": 1.0}
"""Seconds of each call: of the batch of a step, of the states of a micro-batch, and so on."""


class Clock:
    """The host's clock, which stands still but for :data:`COST`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, what: str) -> None:
        self.now += COST[what]


def train(directory: Path, clock: Clock, *, dies_after: int | None = None) -> None:
    trunk = tiny_trunk("mimo")
    module = HeadTraining(TrunkStates(trunk), tiny_head(trunk), num_depths=1, kind="kl", temperature=1.0)
    overrides = {"tokens_per_step": 2 * 16, "max_steps": STEPS, "save_steps": 1, "log_steps": STEPS}
    recipe = tiny_recipe(
        directory,
        directory,
        head__num_depths=1,
        data__seq_len_tokens=16,
        **{f"train__{name}": value for name, value in overrides.items()},
    )
    plan = plan_of(recipe, 1)
    assert plan.accumulation == MICRO_BATCHES
    module.register_forward_hook(lambda *_: clock.spend("forward"))
    next(module.head.parameters()).register_hook(lambda _gradient: clock.spend("backward"))

    def batch(_step: int) -> Sequence[PackedSequence]:
        clock.spend("batch")
        return pack_documents(random_documents((16, 16)), 16, pack=True, seed=0, epoch=0)

    def after_step(done: int) -> None:
        clock.spend("between")
        if done == dies_after:
            raise KeyboardInterrupt

    train_head(
        module,
        options=train_options(recipe),
        plan=plan,
        batch_fn=batch,
        accelerator=Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation),
        state_dir=directory / "state",
        make_log=lambda step: RunLog(directory, step),
        on_step=after_step,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, init, planned = Clock(), LogSums.__init__, loop.collate
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(LogSums, "__init__", lambda *args, **kwargs: init(*args, **kwargs, started=clock.now))

    def collate(*args: Any) -> Any:
        clock.spend("states")
        return planned(*args)

    monkeypatch.setattr(loop, "collate", collate)
    return clock


@pytest.mark.parametrize("dies_after", [None, 1])
def test_each_part_gets_its_own_time_and_the_rest_is_waiting(
    clock: Clock, tmp_path: Path, dies_after: int | None
) -> None:
    again = 0
    if dies_after is not None:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, clock, dies_after=dies_after)
        # It was saved before the kill; the next step's batch is fetched once more.
        again = 1
    train(tmp_path, clock)
    (line,) = read_metrics(tmp_path)
    rounds = STEPS * MICRO_BATCHES
    firsts = STEPS + again
    assert {part: line[f"seconds_{part}"] for part in (*STEP_PARTS, "waiting")} == {
        "fetch": firsts * COST["batch"] + (rounds + again) * COST["states"],
        "forward": rounds * COST["forward"],
        "backward": rounds * COST["backward"],
        "optimiser": STEPS * COST["optimiser"],
        "waiting": STEPS * COST["between"],
    }
    assert line["seconds"] == sum(line[f"seconds_{part}"] for part in (*STEP_PARTS, "waiting"))


@pytest.fixture(autouse=True)
def optimiser_takes_time(clock: Clock) -> Any:
    handle = register_optimizer_step_pre_hook(lambda *_: clock.spend("optimiser"))
    yield
    handle.remove()


def test_a_gpu_s_parts_end_where_its_stream_reaches_them(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The host runs ahead: it fetches for 3 s while the GPU computes for 5, then for 3 s while the GPU has no work."""

    class Event:
        """An event of a stream that is busy until the host's clock passes :attr:`busy_until`."""

        busy_until = 0.0

        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert (device.type, enable_timing) == ("cuda", True)

        def record(self) -> None:
            self.at = max(clock.now, Event.busy_until)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1000

    monkeypatch.setattr(torch, "Event", Event)
    timer = StepTimer(torch.device("cuda", 0))
    seconds = dict.fromkeys(STEP_PARTS, 0.0)
    for hidden in (True, False):
        timer.mark("waiting")
        Event.busy_until = clock.now + 5
        timer.mark("forward")
        clock.now += 3 if hidden else 5 + 3
        timer.mark("fetch")
        clock.now = max(clock.now, Event.busy_until)
        timer.read(seconds)
    assert seconds == {"fetch": 3.0, "forward": 10.0, "backward": 0.0, "optimiser": 0.0}
