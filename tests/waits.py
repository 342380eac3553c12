"""Find where a program makes the host wait for the simulated device, as it would wait for a GPU.

The host waits for a value (``item``, ``tolist``, ``bool``), for a shape that depends on values (``nonzero``, indices
that are masks), and for copies, except for those to the device that are told not to block.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from simulated_device import SimulatedTensor

_aten = torch.ops.aten
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique2",
    "_unique2",
    "unique_dim",
    "equal",
    "is_nonzero",
}
_COPYING = {"_to_copy", "copy_", "_copy_from"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Waits:
    """The places of a block at which the host waits, in order, as ``module.function``."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._modes = (_Operations(self), _Calls(self))

    def __enter__(self) -> Waits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def note(self, what: str) -> None:
        """Record the innermost function that is not torch's or of these tests."""
        place = [one for one in traceback.extract_stack() if not one.filename.startswith(_OTHERS)][-1]
        self.places.append(f"{Path(place.filename).stem}.{place.name}: {what}")


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(one, SimulatedTensor) for one in given)
        if name in _COPYING:
            ends = (given[0], result) if name == "_to_copy" else (given[1], given[0])
            if self._blocks(*ends, kwargs, args):
                self._waits.note(name)
        elif there and (name in _WAITING or (name in _INDEXED and _has_mask(args[1]))):
            self._waits.note(name)
        return result

    @staticmethod
    def _blocks(source: Tensor, target: Tensor, kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
        from_there, to_there = (isinstance(one, SimulatedTensor) for one in (source, target))
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return source.numel() > 0 and from_there != to_there and (from_there or not non_blocking)


def _has_mask(indices: Any) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


class _Calls(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and isinstance(args[0], SimulatedTensor):
            self._waits.note("tolist")
        return func(*args, **(kwargs or {}))
