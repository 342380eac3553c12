"""Choose and apply the dtypes of a run: of matrix products, and of the trunk's weights in memory.

Products use bf16 where the device computes it natively and faster, and fp32 elsewhere (:func:`resolve_precision`).
Without native bf16, torch multiplies bf16 matrices on a CPU in a slow loop of its own, 4 to 8 times slower than fp32
for many rows; Intel's AVX512_BF16 without AMX takes 1.1 to 2 times as long as fp32. The choice depends on feature
queries and never on a timing, so that equal machines choose alike. Weights are held as stored, or in fp32 on a CPU with
enough memory (:func:`held_dtype`).

A trunk can multiply in another dtype than it is held in (:meth:`mtp_train.trunk.load.Trunk.computing_in`): the weights
of one layer at a time are converted while the layer runs, which takes the memory of one layer.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint
from mtp_train.heads.diagnose import stored_dtype
from mtp_train.upstream.transformers_private import kept_in_fp32

Precision = Literal["fp32", "bf16"]
COMPUTE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (torch.float32, *HALF_DTYPES)
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
    """Return whether a device multiplies bf16 natively and faster than fp32, and a clause for messages."""
    if device.type == "cpu":
        return _cpu_support()
    if device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
        return native, "macOS 14 and later multiply bf16 on MPS" if native else "macOS before 14 has no bf16 on MPS"
    if device.type not in ("cuda", "xpu"):
        return False, f"bf16 on {device.type} was never tested"
    kind = torch.cuda if device.type == "cuda" else torch.xpu
    # By default the query also counts emulation, which is slower than fp32.
    native = kind.is_bf16_supported(including_emulation=False)
    return native, f"{kind.get_device_name(device)} {_has(native)}"


def _cpu_support() -> tuple[bool, str]:
    machine = platform.machine().lower()
    capability = torch.backends.cpu.get_cpu_capability()
    # oneDNN multiplies bf16, limited by ONEDNN_MAX_CPU_ISA. torch for Apple's CPUs is built without oneDNN.
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if machine not in ("x86_64", "amd64"):
        return native, f"this CPU ({machine}) {_has(native)}"
    # oneDNN also reports support on AVX-512 without bf16 instructions, where it emulates them. torch's own queries read
    # the processor's features, whatever the limit in ATEN_CPU_CAPABILITY.
    amx = torch.cpu._is_amx_tile_supported()
    dot_products = torch.cpu._is_avx512_bf16_supported()
    native = native and (amx or dot_products) and capability == "AVX512"
    # Intel's AVX512_BF16 has half the throughput of its fp32 (measured on Emerald Rapids): AMX is Intel's bf16, and
    # virtual machines often hide it. By AMD's manuals its AVX512_BF16 has twice the throughput of fp32.
    if native and not amx and "Intel" in torch.cpu.get_capabilities().get("cpu_name", ""):
        return False, f"this CPU ({capability}, Intel without AMX) multiplies bf16 more slowly than fp32"
    return native, f"this CPU ({capability}) {_has(native)}"


def _has(native: bool) -> str:
    return "multiplies bf16 natively" if native else "has no native bf16"


def held_dtype(asked: str, stored: torch.dtype, num_weights: int, device: torch.device) -> torch.dtype:
    """Return the dtype in which a trunk's weights are held.

    For ``auto`` it is the stored dtype, except on a CPU with enough memory for fp32, which decodes exactly and
    multiplies fast on every processor.

    Args:
        asked: ``auto``, ``float32`` or ``bfloat16``.
    """
    if asked != "auto":
        return getattr(torch, asked)
    fits = device.type == "cpu" and 4 * num_weights <= MEMORY_SHARE * main_memory_bytes()
    return torch.float32 if fits else stored


def trunk_dtype(checkpoint: Checkpoint, device: torch.device, asked: str = "auto") -> torch.dtype:
    """Return the dtype in which the trunk of a checkpoint is held, see :func:`held_dtype`."""
    num_weights = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return held_dtype(asked, TORCH_DTYPES[stored_dtype(checkpoint)], num_weights, device)


def main_memory_bytes() -> int:
    """Return the memory of this machine in bytes, or the limit of its control group where that is less."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


_ALIGNED = 16
"""Numbers, 64 bytes: kernels sum in another order where a matrix starts at another alignment."""


class Scratch:
    """One buffer for all units, as one unit runs at a time: allocating memory costs more than the conversion."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def copies(self, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        sizes = [-(-tensor.numel() // _ALIGNED) * _ALIGNED for tensor in tensors]
        total = sum(sizes)
        device = tensors[0].device
        if self._buffer.numel() < total or self._buffer.device != device or self._buffer.dtype != dtype:
            self._buffer = torch.empty(total, dtype=dtype, device=device)
        parts = zip(self._buffer[:total].split(sizes), tensors, strict=True)
        return [part[: tensor.numel()].view(tensor.shape).copy_(tensor) for part, tensor in parts]


@contextmanager
def computing_in(
    model: nn.Module, layers: Collection[nn.Module], dtype: torch.dtype, scratch: Scratch | None
) -> Iterator[None]:
    """Make a model multiply in a dtype inside this context, see :meth:`mtp_train.trunk.load.Trunk.computing_in`.

    A layer is converted as a unit, because some layers read the weights of their submodules without calling them.
    """
    kept = kept_in_fp32(model)
    scratch = scratch or Scratch()
    with ExitStack() as stack:
        for name, unit in _units(model, layers):
            held = _to_convert(name, unit, dtype, kept)
            if not held:
                continue
            converted = _Unit(unit, dtype, held, scratch)
            for handle in (
                unit.register_forward_pre_hook(converted.before, with_kwargs=True),
                # always_call: a forward may end with an exception, such as KeysWritten from a cache in keys-only mode.
                unit.register_forward_hook(converted.after, always_call=True),
            ):
                stack.callback(handle.remove)
            # Hooks do not run on KeyboardInterrupt.
            stack.callback(converted.restore)
        yield


Held = tuple[dict[str, Any], str, Tensor]
"""A weight: the dict of its module that holds it, its name there, and its value."""


def _to_convert(name: str, module: nn.Module, dtype: torch.dtype, kept: tuple[str, ...]) -> list[Held]:
    """Return the weights of a module that are held in another floating-point dtype.

    In half precision, buffers such as rotary frequencies stay in fp32, and so do the parameters whose full names, which
    begin with the module's, contain a part in ``kept``.
    """
    wide = dtype is torch.float32
    return [
        (held, key, tensor)
        for path, part in module.named_modules(prefix=name)
        for held in ((part._parameters, part._buffers) if wide else (part._parameters,))
        for key, tensor in held.items()
        if tensor is not None and tensor.dtype in FLOAT_DTYPES and tensor.dtype is not dtype
        if wide or not any(one in f"{path}.{key}" for one in kept)
    ]


def _units(module: nn.Module, layers: Collection[nn.Module], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules to convert as a unit, by name: layers, and the largest modules without layers."""
    if module in layers or not any(child in layers for child in module.modules()):
        yield name, module
        return
    for part, child in module.named_children():
        yield from _units(child, layers, f"{name}.{part}")


class _Unit:
    """Convert a unit's weights and inputs before its forward, and restore the weights afterwards.

    Of an embedding the output is converted and not the matrix, which is large and not multiplied.
    """

    def __init__(self, unit: nn.Module, dtype: torch.dtype, held: list[Held], scratch: Scratch) -> None:
        self._dtype = dtype
        self._scratch = scratch
        self._embeds = type(unit) is nn.Embedding
        self._held = [] if self._embeds else held

    @torch.no_grad()
    def before(self, _unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the weights with converted copies, and convert the inputs."""
        here = [tensor for _, _, tensor in self._held if not tensor.is_meta]
        copies = iter(self._scratch.copies(here, self._dtype) if here else ())
        for held, name, tensor in self._held:
            # In an offloaded layer, accelerate loads a weight in the dtype of the parameter in its place.
            held[name] = (
                nn.Parameter(torch.empty_like(tensor, dtype=self._dtype), False) if tensor.is_meta else next(copies)
            )
        return tuple(map(self._converted, args)), {name: self._converted(one) for name, one in kwargs.items()}

    def after(self, _unit: nn.Module, _args: Any, output: Any) -> Any:
        self.restore()
        return self._converted(output) if self._embeds else None

    def restore(self) -> None:
        """Restore the weights."""
        for held, name, tensor in self._held:
            held[name] = tensor

    def _converted(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES else value
