"""Name the device of a process, and set its number of CPU threads."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate.utils import parse_flag_from_env
from rich.console import Console

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.errors import DataError
from mtp_train.train.plan import GIB
from mtp_train.trunk.precision import main_memory_bytes


class Device(NamedTuple):
    name: str
    kind: str
    """torch's device type."""
    memory_bytes: int
    """In whole GiB: GPUs of one type report slightly different sizes, and equal plans have to follow from them."""

    def __str__(self) -> str:
        return f"{self.name} ({self.memory_bytes / GIB:.3g} GiB)" if "GiB" not in self.name else f"a GPU of {self.name}"


MEMORY_GIB = {"h100": 79, "h200": 139, "b200": 178, "a100": 79, "l40s": 44, "rtx4090": 23, "rtx5090": 31, "mi300x": 191}
"""Memory of GPUs by name, as torch reports it, rounded down."""


def device_named(name: str | None) -> Device:
    """Return a GPU of the table or of a memory, ``24GiB`` or ``16GB``, or for None the device of this process.

    Raises:
        DataError: The name is neither in the table nor an amount of memory.
    """
    if name is not None:
        size = re.fullmatch(r"(\d+(?:\.\d+)?) ?(gi?b)", name.lower())
        unit = 1.0 if size is None or size[2] == "gib" else 1e9 / GIB
        gib = MEMORY_GIB.get(name.lower()) if size is None else float(size[1]) * unit
        if not gib:
            raise DataError(
                f"--device: {name!r}; expected one of {', '.join(MEMORY_GIB)}, or the memory of a GPU, as "
                "--device 24GiB. Correct it."
            )
        return Device(name.lower() if size is None else f"{gib:.4g} GiB", "cuda", int(gib * GIB))
    kind = _device_type()
    if kind != "cuda":
        return Device("this machine", kind, main_memory_bytes())
    total = torch.cuda.get_device_properties().total_memory
    return Device(torch.cuda.get_device_name(), "cuda", total // GIB * GIB if total > GIB else total)


def _device_type() -> str:
    """Return the type of the device that accelerate will choose, without its state, which joins the processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or parse_flag_from_env("ACCELERATE_USE_CPU") else accelerator.type


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    # platform.processor() gives no more than the architecture on Linux.
    cores = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", cores.read_text(), re.MULTILINE) if cores.is_file() else None
    return f"cpu ({named[1] if named else platform.processor() or platform.machine()})"


SHARED_WORK = 512**2
"""Number of multiplications (rows times hidden size squared) from which several threads are faster than one."""
MOST_THREADS = 16
"""Most threads for one product; more make it slower."""
_LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
"""Variables that accelerate's launcher and torchrun set for every process."""


def set_threads(work: str, rows: int, checkpoint: Checkpoint, device: torch.device, console: Console) -> None:
    """Set the number of threads for a stage that runs on a CPU, and print it."""
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
    if threads_are_set():
        return f"{torch.get_num_threads()} thread(s), as set"
    cores = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    width = text_config.get("hidden_size")
    threads = min(cores, MOST_THREADS) if isinstance(width, int) and rows * width**2 >= SHARED_WORK else 1
    torch.set_num_threads(threads)
    return f"{threads} thread(s) of {cores} core(s)"


def usable_cores() -> int:
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return min(physical, allowed)


def threads_are_set() -> bool:
    """Return whether the user set a number of threads; OMP_NUM_THREADS=1 of a launched process is the launcher's."""
    if "MKL_NUM_THREADS" in os.environ:
        return True
    found = os.environ.get("OMP_NUM_THREADS")
    return found is not None and not (found == "1" and any(name in os.environ for name in _LAUNCHERS))
