"""Choose the dtypes of a run: the precision of matrix products, and the dtype in which the trunk's weights are held.

Products use bf16 where the device computes it natively and faster, and fp32 elsewhere (:func:`resolve_precision`).
Without native bf16, torch multiplies bf16 matrices on a CPU in a slow loop of its own, 4 to 8 times slower than fp32
for many rows; Intel's AVX512_BF16 without AMX takes 1.1 to 2 times as long as fp32. The choice depends on feature
queries and never on a timing, so that equal machines choose alike. Weights are held as stored, or in fp32 on a CPU with
enough memory (:func:`held_dtype`).
"""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch

from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint
from mtp_train.families import Family
from mtp_train.heads.diagnose import stored_dtype

Precision = Literal["fp32", "bf16"]
COMPUTE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
HALF_DTYPES = (torch.bfloat16, torch.float16)
MEMORY_SHARE = 0.6
"""The largest share of a machine's memory for the trunk: the head, its optimiser and activations need the rest."""


class Resolved(NamedTuple):
    """A precision, and the reason for it: whether the device multiplies bf16 natively and faster than fp32."""

    precision: Precision
    reason: str


def resolve_precision(asked: Literal["auto", "fp32", "bf16"], device: torch.device) -> Resolved:
    """Return the precision of training on a device; an explicit setting of the user is kept."""
    native, why = bf16_support(device)
    if asked == "auto":
        return Resolved("bf16" if native else "fp32", why)
    if asked == "bf16" and not native:
        why += ": expect slower steps than in fp32, up to 5 times"
    return Resolved(asked, why)


def slow_halves(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of many rows in this dtype are far slower on the device than in fp32."""
    return device.type == "cpu" and dtype in HALF_DTYPES and not bf16_support(device)[0]


def bf16_support(device: torch.device) -> tuple[bool, str]:
    """Return whether a device multiplies bf16 natively and faster than fp32, and a clause that says so."""
    if device.type == "cpu":
        return _cpu_support()
    if device.type == "cuda":
        # By default the query also counts emulation, which is slower than fp32.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return native, f"{torch.cuda.get_device_name(device)} {_has(native)}"
    if device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
        return native, "macOS 14 and later multiply bf16 on MPS" if native else "macOS before 14 has no bf16 on MPS"
    if device.type == "xpu":
        native = torch.xpu.is_bf16_supported(including_emulation=False)
        return native, f"{torch.xpu.get_device_name(device)} {_has(native)}"
    return False, f"bf16 on {device.type} was never tested"


def _cpu_support() -> tuple[bool, str]:
    machine, capability = platform.machine().lower(), torch.backends.cpu.get_cpu_capability()
    # oneDNN multiplies bf16, limited by ONEDNN_MAX_CPU_ISA. torch for Apple's CPUs is built without oneDNN.
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if machine not in ("x86_64", "amd64"):
        return native, f"this CPU ({machine}) {_has(native)}"
    # oneDNN also reports support on AVX-512 without bf16 instructions, where it emulates them. torch's own queries read
    # the processor's features, whatever the limit in ATEN_CPU_CAPABILITY.
    amx, dot_products = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()
    native = native and (amx or dot_products) and capability == "AVX512"
    # Intel's AVX512_BF16 has half the throughput of its fp32 (measured on Emerald Rapids): AMX is Intel's bf16, and
    # virtual machines often hide it. By AMD's manuals its AVX512_BF16 has twice the throughput of fp32.
    if native and not amx and "Intel" in torch.cpu.get_capabilities().get("cpu_name", ""):
        return False, f"this CPU ({capability}, Intel without AMX) multiplies bf16 more slowly than fp32"
    return native, f"this CPU ({capability}) {_has(native)}"


def _has(native: bool) -> str:
    return "multiplies bf16 natively" if native else "has no native bf16"


def held_dtype(stored: torch.dtype, num_weights: int, device: torch.device) -> torch.dtype:
    """Return the dtype in which a trunk's weights are held where the user sets none.

    It is the stored dtype, except on a CPU with enough memory for fp32, which decodes exactly and multiplies fast on
    every processor. With less memory, ``widen.py`` converts one layer at a time.

    Args:
        stored: The checkpoint's dtype.
        num_weights: The number of weights of the trunk.
        device: The device on which it will run.
    """
    fits = 4 * num_weights <= MEMORY_SHARE * main_memory_bytes()
    return torch.float32 if device.type == "cpu" and fits else stored


def main_memory_bytes() -> int:
    """Return the memory of this machine in bytes, or the limit of its control group where that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def automatic_dtype(checkpoint: Checkpoint, family: Family, device: torch.device) -> torch.dtype:
    """Return the dtype in which a trunk is held where the user sets none, see :func:`held_dtype`."""
    num_weights = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return held_dtype(TORCH_DTYPES[stored_dtype(checkpoint, family)], num_weights, device)
