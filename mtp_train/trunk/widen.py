"""Run a model held in bf16 or fp16 in fp32: the weights of one layer at a time are converted while it runs.

The weights stay as they are held, and the fp32 copies need the memory of one layer. This is for CPUs without native
bf16, where products in bf16 take several times as long, and for training in fp32 on a trunk held in fewer bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import HALF_DTYPES, slow_halves

_ALIGNED = 16
"""Numbers, 64 bytes: kernels sum in another order where a matrix starts at another alignment."""


class Scratch:
    """One fp32 buffer for all units, as one unit runs at a time: allocating memory costs more than the conversion."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def views(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return fp32 copies of the tensors, in the buffer."""
        sizes = [-(-tensor.numel() // _ALIGNED) * _ALIGNED for tensor in tensors]
        total = sum(sizes)
        if self._buffer.numel() < total or self._buffer.device != tensors[0].device:
            self._buffer = torch.empty(total, device=tensors[0].device)
        parts = zip(self._buffer[:total].split(sizes), tensors, strict=True)
        return [part[: tensor.numel()].view(tensor.shape).copy_(tensor) for part, tensor in parts]


@contextmanager
def widened(trunk: Trunk, scratch: Scratch | None = None) -> Iterator[None]:
    """Make a trunk multiply in fp32 and return fp32 inside this context, whatever dtype it is held in.

    The same trunk loaded in fp32 gives equal results. Weights in fp32 and packed weights stay unchanged. Weights
    that are read outside of their module's forward (``trunk.lm_head_VD``) keep their dtype.

    Args:
        trunk: The trunk.
        scratch: A buffer to reuse. Share it only among callers that are always, or never, in inference mode.
    """
    units = list(_units(trunk.causal_lm, set(trunk.layers)))
    scratch = scratch or Scratch()
    with ExitStack() as stack:
        for unit in units:
            wide: _Wide | _Embedded = _Embedded() if type(unit) is nn.Embedding else _Wide(unit, scratch)
            for handle in (
                unit.register_forward_pre_hook(wide.before, with_kwargs=True),
                # always_call: a forward may end with an exception, such as KeysWritten from a cache in keys-only mode.
                unit.register_forward_hook(wide.after, always_call=True),
            ):
                stack.callback(handle.remove)
            # Hooks do not run on KeyboardInterrupt.
            stack.callback(wide.restore)
        yield


@contextmanager
def many_rows(trunk: Trunk, head: MtpHead) -> Iterator[MtpHead]:
    """Run a trunk over many rows in the faster precision, and yield the head to run with it.

    Where the device is slow in the dtype in which they are held, the trunk is widened and the head is a copy in fp32.
    """
    weight = trunk.lm_head_VD
    if not slow_halves(weight.dtype, weight.device):
        yield head
        return
    with widened(trunk):
        yield deepcopy(head).float()


def _units(module: nn.Module, wholes: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules to convert as a unit: layers, and other modules with weights in half precision.

    A layer is one unit, because some layers read the weights of their submodules without calling them.
    """
    if module in wholes or not any(child in wholes for child in module.modules()):
        if any(tensor.dtype in HALF_DTYPES for tensor in (*module.parameters(), *module.buffers())):
            yield module
        return
    for child in module.children():
        yield from _units(child, wholes)


class _Wide:
    """Convert a unit's weights before its forward, and restore them afterwards."""

    def __init__(self, unit: nn.Module, scratch: Scratch) -> None:
        self._scratch = scratch
        self._places = [
            (tensors, name, tensor)
            for module in unit.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None and tensor.dtype in HALF_DTYPES
        ]

    @torch.no_grad()
    def before(self, _unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Replace the weights with fp32 copies, and convert the inputs."""
        wide = self._scratch.views([tensor for _, _, tensor in self._places])
        for (tensors, name, _), one in zip(self._places, wide, strict=True):
            tensors[name] = one  # type: ignore[assignment]
        return tuple(_wide(one) for one in args), {name: _wide(one) for name, one in kwargs.items()}

    def after(self, _unit: nn.Module, _args: Any, _output: Any) -> None:
        """Restore the weights."""
        self.restore()

    def restore(self) -> None:
        """Restore the weights."""
        for tensors, name, held in self._places:
            tensors[name] = held  # type: ignore[assignment]


class _Embedded:
    """Convert the output of an embedding and not its matrix, which is large and not multiplied."""

    def before(self, _unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the tokens unchanged."""
        return args, kwargs

    def after(self, _unit: nn.Module, _args: Any, output: Any) -> Any:
        """Return the embedding in fp32."""
        return _wide(output)

    def restore(self) -> None:
        """Do nothing: the matrix was not replaced."""


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value
