"""Name the machine that figures were measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the processor's name, where the system provides it."""
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
