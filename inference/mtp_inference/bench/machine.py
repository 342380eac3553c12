"""Name the machine that figures were measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch


def cpu_name() -> str:
    """Return the processor's name, where the system provides it."""
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_facts() -> dict[str, Any]:
    """Return the processor's name, torch's instruction set, and the number of threads."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": cpu_name(), "capability": capability, "threads": torch.get_num_threads()}
