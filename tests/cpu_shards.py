"""The command line on CPU processes that accelerate shards as it shards on GPUs; for its launcher to start in tests.

accelerate shards on no CPU under FSDP2: it takes processes there for plain data-parallel ones. Told that they are what
processes on GPUs are, it does everything else as it does there. ``DIES=RANK:STEP`` in the environment makes a process
kill itself before that step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType

from mtp_train.cli import main
from mtp_train.train import loop


def die_before(step: int) -> None:
    """Have this process killed when it is about to do a step of this run, counted from 0."""
    optimise, calls = loop.optimise, iter(range(step))

    def optimise_or_die(*args: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimise(*args)

    loop.optimise = optimise_or_die


def pretend_to_have_gpus() -> None:
    """Have accelerate shard here, where its launcher asks for FSDP2."""
    if "ACCELERATE_USE_FSDP" in os.environ:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    pretend_to_have_gpus()
    if "DIES" in os.environ:
        rank, step = map(int, os.environ["DIES"].split(":"))
        if os.environ.get("RANK", "0") == str(rank):
            die_before(step)
    sys.exit(main(["run", *sys.argv[1:]]))
