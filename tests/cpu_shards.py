"""The command line on CPU processes that accelerate shards as it shards on GPUs; for its launcher to start in tests.

accelerate shards on no CPU under FSDP2: it takes processes there for plain data-parallel ones. Told that they are what
processes on GPUs are, it does everything else as it does there. ``DIES=RANK:STEP`` in the environment makes a process
kill itself before that step, ``DIES_IN=RANK:MODULE:FUNCTION`` when it calls a function. ``SHARD_BYTES`` is the size of
the files of hidden states; ``FULL=RANK:NUMBER`` leaves a process no room for those behind so many. ``ATTEMPTS`` is how
often processes look for one another's files. The word ``then`` stands between runs that the same processes do in turn.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.utils import DistributedType

from mtp_train.cli.main import main
from mtp_train.runs import rescue, run
from mtp_train.train import hidden_cache, loop
from mtp_train.train.stopping import leave
from runs import few_timed_prompts, shorten_probes

COMMANDS = ("probe", "rescue")
"""Those whose name is said; the others run a recipe."""


def die_before(step: int) -> None:
    """Have this process killed when it is about to do a step of this run, counted from 0."""
    optimise = loop.optimise
    calls = iter(range(step))

    def optimise_or_die(*args: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimise(*args)

    loop.optimise = optimise_or_die


def die_in(module: str, function: str) -> None:
    """Have this process killed when it calls a function of a module."""
    setattr(importlib.import_module(module), function, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))


def fill_disk_after(number: int) -> None:
    """Leave this process no room for more than so many files of hidden states."""
    write = hidden_cache.write_safetensors
    calls = iter(range(number))

    def write_or_fail(path: Path, *args: Any) -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *args)

    hidden_cache.write_safetensors = write_or_fail


def asked_of_this_process(variable: str) -> int | None:
    """Return what RANK:NUMBER in the environment asks of this process; None if of another, or nothing."""
    rank, _, number = os.environ.get(variable, "").partition(":")
    return int(number) if rank == os.environ.get("RANK", "0") else None


def pretend_to_have_gpus() -> None:
    """Have accelerate shard here, where its launcher asks for FSDP2."""
    if "ACCELERATE_USE_FSDP" in os.environ:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    pretend_to_have_gpus()
    if (step := asked_of_this_process("DIES")) is not None:
        die_before(step)
    dying_rank, _, place = os.environ.get("DIES_IN", "").partition(":")
    if dying_rank == os.environ.get("RANK", "0"):
        die_in(*place.split(":"))
    if (files := asked_of_this_process("FULL")) is not None:
        fill_disk_after(files)
    hidden_cache.SHARD_BYTES = int(os.environ.get("SHARD_BYTES", hidden_cache.SHARD_BYTES))
    run.ATTEMPTS = int(os.environ.get("ATTEMPTS", run.ATTEMPTS))
    runs = [list(words) for ends, words in itertools.groupby(sys.argv[1:], lambda word: word == "then") if not ends]
    with few_timed_prompts(), pytest.MonkeyPatch.context() as patch:
        # Heads of tiny models are random, which is no fault here, and always to be retrained.
        shorten_probes(patch)
        patch.setattr(rescue, "LEAST_TAU", 1.0)
        judge = rescue.judge
        patch.setattr(rescue, "judge", lambda found: ("retrain", judge(found)[1]))
        leave(max([main(words if words[0] in COMMANDS else ["run", *words]) for words in runs]))
