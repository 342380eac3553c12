"""The precision of matrix products: bf16 where the device computes it natively, fp32 elsewhere.

Without native bf16, torch multiplies bf16 matrices on a CPU in a slow loop of its own: 4 to 8 times slower than fp32
at many rows. The choice comes from feature queries, never from a timing, so that equal machines choose alike.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

Precision = Literal["fp32", "bf16"]
COMPUTE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
HALF_DTYPES = (torch.bfloat16, torch.float16)
MEMORY_SHARE = 0.6
"""Of a machine's memory, the most that a trunk may take: the head, its optimiser and activations need the rest."""


class Resolved(NamedTuple):
    """A precision, and what the device makes of bf16."""

    precision: Precision
    reason: str


def resolve_precision(asked: Literal["auto", "fp32", "bf16"], device: torch.device) -> Resolved:
    """Return the precision of training on a device; a precision that the user names is obeyed."""
    native, why = bf16_support(device)
    if asked == "auto":
        return Resolved("bf16" if native else "fp32", why)
    if asked == "bf16" and not native:
        why += ": expect steps to take about 5 times as long as in fp32"
    return Resolved(asked, why)


def slow_halves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of many rows in this dtype are far slower on the device than in fp32."""
    return device.type == "cpu" and dtype in HALF_DTYPES and not bf16_support(device)[0]


def bf16_support(device: torch.device) -> tuple[bool, str]:
    """Return whether a device multiplies bf16 matrices natively, and a clause that says so."""
    if device.type == "cpu":
        return _cpu_support()
    if device.type == "cuda":
        # Emulation counts as support by default, and is slower than fp32.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return native, f"{torch.cuda.get_device_name(device)} {_has(native)}"
    if device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
        return native, "macOS 14 and later multiply bf16 on MPS" if native else "macOS before 14 has no bf16 on MPS"
    if device.type == "xpu":
        native = torch.xpu.is_bf16_supported(including_emulation=False)
        return native, f"{torch.xpu.get_device_name(device)} {_has(native)}"
    return False, f"nothing is known of bf16 on {device.type}"


def _cpu_support() -> tuple[bool, str]:
    machine, capability = platform.machine().lower(), torch.backends.cpu.get_cpu_capability()
    # oneDNN multiplies bf16, within what ONEDNN_MAX_CPU_ISA allows. torch on Apple's CPUs comes without it.
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if machine not in ("x86_64", "amd64"):
        return native, f"this CPU ({machine}) {_has(native)}"
    # oneDNN says yes to AVX-512 without bf16 instructions too, which it emulates. torch's own queries look at the
    # processor, whatever ATEN_CPU_CAPABILITY holds it back to.
    features = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    native = native and features and capability == "AVX512"
    return native, f"this CPU ({capability}) {_has(native)}"


def _has(native: bool) -> str:
    return "multiplies bf16 natively" if native else "has no native bf16"


def held_dtype(stored: torch.dtype, num_weights: int, device: torch.device) -> torch.dtype:
    """Return the dtype to hold a trunk's weights in where nobody names one.

    As stored; on a CPU fp32 where that fits, which decodes exactly and multiplies fast on every processor. Where it
    does not fit, ``widen.py`` converts one layer at a time.

    Args:
        stored: The checkpoint's dtype.
        num_weights: How many numbers the trunk has.
        device: Where it will run.
    """
    fits = 4 * num_weights <= MEMORY_SHARE * main_memory_bytes()
    return torch.float32 if device.type == "cpu" and fits else stored


def main_memory_bytes() -> int:
    """Return the memory of this machine, or what its control group leaves of it."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
