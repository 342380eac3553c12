"""A device other than the CPU, without one: tensors named so, computed on the CPU, and refused beside CPU tensors.

As on a GPU, operations on tensors of both fail, but for numbers (CPU tensors without dimensions), copies, and indices
that are still on the CPU. Gradient checkpointing cannot be run on it: a device's gradients are computed in a thread of
their own, which knows nothing of what stands in for the device here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.backend_registration as backends
from torch import Tensor
from torch.autograd.grad_mode import inference_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "simulated"
AVAILABLE = hasattr(backends, "_setup_privateuseone_for_python_backend")
"""Whether this torch takes a device that is written in Python."""
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._copy_from.default, _aten.copy.default}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
}
_MATH_ATTENTION = 0
# Autocast has no casts of the device's operations: they run in the dtype of their inputs.
_NO_CASTS = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")


class SimulatedTensor(Tensor):
    """A tensor of the device; ``inner`` is where its values are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> SimulatedTensor:
        made: SimulatedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Sees the operations that no tensor of the device is in: those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Sees what torch does below where operations are seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_simulated(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        if func in (Tensor.tolist, Tensor.data_ptr) and isinstance(args[0], SimulatedTensor):
            return func(args[0].inner)
        return func(*args, **kwargs)


class _Backend(backends._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _is_simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE


def _is_stray(leaf: Any) -> bool:
    on_cpu = isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor) and leaf.device.type == "cpu"
    return on_cpu and leaf.ndim > 0


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    ours = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)}
    if ours and func not in _COPIES:
        read = leaves if func not in _INDEXED else pytree.tree_leaves((args[0], args[2:], kwargs))
        strays = [tuple(leaf.shape) for leaf in read if _is_stray(leaf)]
        if strays:
            raise RuntimeError(f"{func}: CPU tensors of shapes {strays} beside tensors of {DEVICE}")
    if ours and func is _aten._fused_sdp_choice.default:
        return _MATH_ATTENTION
    plain_args, plain_kwargs = pytree.tree_unflatten([_plain(leaf) for leaf in leaves], spec)
    if func is _aten.histc.default and not plain_args[0].is_floating_point():
        # The CPU counts floats only, other devices integers too.
        plain_args = (plain_args[0].float(), *plain_args[1:])
    result = func(*plain_args, **plain_kwargs)

    asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    if func in _COPIES:
        to_device = isinstance(args[0], SimulatedTensor)
    else:
        to_device = any(map(_is_simulated, asked)) if asked else bool(ours)

    def outer(one: Tensor) -> Tensor:
        if to_device:
            # What an operation changes in place stays the tensor that it was.
            return ours[id(one)] if id(one) in ours else SimulatedTensor(one)
        # What lies on the CPU already would be no copy.
        return one.clone() if id(one) in ours else one

    return pytree.tree_map_only(Tensor, outer, result)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE else leaf


@contextmanager
def simulated_device() -> Iterator[torch.device]:
    """Register the device; tensors that are made on it or moved to it inside of the context belong to it."""
    if torch._C._get_privateuse1_backend_name() != DEVICE:
        backends._setup_privateuseone_for_python_backend(DEVICE, _Backend())
        _NO_CASTS.fallback(torch.library.fallthrough_kernel)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with pytest.MonkeyPatch.context() as patch:
        # Views of tensors that hold others need the versions that inference mode keeps none of.
        patch.setattr(inference_mode, "__enter__", torch.no_grad.__enter__)
        patch.setattr(inference_mode, "__exit__", torch.no_grad.__exit__)
        # As on a GPU, a parameter that moves stays the same object, for optimisers.
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with _Operations(), _Calls():
                yield torch.device(DEVICE, 0)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
