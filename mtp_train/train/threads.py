"""Set the number of CPU threads from the machine's cores and the model's size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from rich.console import Console

from mtp_train.checkpoints.files import Checkpoint

SHARED_WORK = 512**2
"""Number of multiplications (rows times hidden size squared) from which several threads are faster than one."""
MOST_THREADS = 16
"""Most threads for one product; more make it slower."""
_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
"""Variables that accelerate's launcher and torchrun set for every process."""


def settle_threads(work: str, rows: int, checkpoint: Checkpoint, device: torch.device, console: Console) -> None:
    """Set the number of threads for a stage that runs on a CPU, and print it.

    Args:
        work: Name of the stage in the printed line.
        rows: Rows of the stage's matrix products: tokens that are computed together.
        checkpoint: The trunk's checkpoint.
        device: The trunk's device.
        console: The console to print on.
    """
    if device.type == "cpu":
        console.print(f"{work} with {use_threads(checkpoint.text_config, rows)}", highlight=False)


def use_threads(text_config: Mapping[str, Any], rows: int = 1) -> str:
    """Set the number of threads for a model, unless the user has set it; return a clause with the number in use.

    Small products take less time than synchronising threads; large ones gain from every core. Without a number from the
    user, ``accelerate launch`` and ``torchrun`` set OMP_NUM_THREADS=1 for their processes, which leaves all cores but
    one idle.

    Args:
        text_config: The trunk's text config as stored, not validated yet.
        rows: Rows of the matrix products.
    """
    found = torch.get_num_threads()
    if threads_are_set():
        return f"{found} thread(s), as set"
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    width = text_config.get("hidden_size")
    threads = threads_for(rows * width**2 if isinstance(width, int) else 0, cores)
    torch.set_num_threads(threads)
    return f"{threads} thread(s) of {max(1, cores)} core(s)"


def threads_for(multiplications: int, cores: int) -> int:
    """Return the fastest number of threads for a product of that size on that many cores."""
    return max(1, min(cores, MOST_THREADS)) if multiplications >= SHARED_WORK else 1


def usable_cores() -> int:
    """Return the number of physical cores that this process may run on."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return min(physical, allowed)


def threads_are_set() -> bool:
    """Return whether the user set a number of threads; OMP_NUM_THREADS=1 of a launched process is the launcher's."""
    if "MKL_NUM_THREADS" in os.environ:
        return True
    found = os.environ.get("OMP_NUM_THREADS")
    return found is not None and not (found == "1" and any(name in os.environ for name in _LAUNCHERS))
