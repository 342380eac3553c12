#!/usr/bin/env python
"""Print the environment of a measurement as one line of JSON: hardware, driver, versions, git commit and date.

    python inference/benchmarks/gpu_machine.py --device cuda --commit "$(git rev-parse HEAD)"

Exits with 1 where torch sees no GPU and ``--device cuda`` asks for one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[2]
COMMIT = ("describe", "--always", "--exclude=*", "--dirty", "--abbrev=40")
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "accelerate",
    "peft",
    "datasets",
    "pyarrow",
    "gguf",
    "flash-linear-attention",
    "causal-conv1d",
    "numpy",
)


def machine(device: str, commit: str | None) -> dict[str, Any]:
    """Return the record."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _said("git", "-C", str(REPOSITORY), *COMMIT),
        "device": device,
        "gpu": _gpu() if device == "cuda" and torch.cuda.is_available() else None,
        "cpu": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        # Triton and torch.compile need a C compiler at run time.
        "compiler": next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None),
        "tf32_products": torch.backends.cuda.matmul.allow_tf32,
    }


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
    }


def _said(*command: str) -> str | None:
    """Return the output of a command; None where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the record.

    Returns:
        0, or 1 where a GPU is required and there is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="default: what git says")
    options = parser.parse_args(arguments)
    print(json.dumps(machine(options.device, options.commit)))
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_machine.py: torch sees no GPU; expected one. Use --device cpu.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
