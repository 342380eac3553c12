"""Name the device of a process: this machine's, one of a table, or one that has a given amount of memory."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import torch

from mtp_train.errors import DataError
from mtp_train.train.estimate import GIB
from mtp_train.trunk.precision import main_memory_bytes


class Device(NamedTuple):
    """A device and its memory."""

    name: str
    kind: str
    """torch's device type."""
    memory_bytes: int


MEMORY_GIB = {"h100": 80, "h200": 141, "a100": 80, "l40s": 48, "rtx4090": 24, "mi300x": 192}
"""Memory of GPUs by name."""


def device_named(name: str | None) -> Device:
    """Return a GPU of the table or of a given memory, ``24GiB``, or for None the device that this process would use.

    Raises:
        DataError: The name is neither in the table nor an amount of memory.
    """
    if name is not None:
        size = re.fullmatch(r"(\d+(?:\.\d+)?) ?gib", name.lower())
        gib = MEMORY_GIB.get(name.lower()) if size is None else float(size[1])
        if not gib:
            raise DataError(
                f"--device: {name!r}; expected one of {', '.join(MEMORY_GIB)}, or the memory of a GPU. Correct it, or "
                "write --memory 24GiB."
            )
        return Device(name, "cuda", int(gib * GIB))
    kind = _device_type()
    if kind != "cuda":
        return Device(kind, kind, main_memory_bytes())
    return Device(torch.cuda.get_device_name(), "cuda", torch.cuda.get_device_properties().total_memory)


def _device_type() -> str:
    """Return the type of the device that accelerate will choose, without its state, which joins the processes."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    return "cpu" if accelerator is None or wants_cpu else accelerator.type
