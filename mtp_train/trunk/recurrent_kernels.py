"""Run recurrent layers in the kernels of installed packages where the tensors fit them, else in torch.

When transformers imports a model, it replaces the model's torch functions by those of flash-linear-attention,
causal-conv1d and mamba-ssm as far as these packages can be imported. It does not look at the tensors: with
flash-linear-attention installed, Qwen3.5 fails on a CPU. The kernels stay in use for prefill, whose chunks continue an
earlier state, and for the trunk's forwards in training. For rounds, the decoder replaces all of these functions
(``mtp_inference/cache/recurrent.py``).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from mtp_train.families.spec import RecurrentKernels
from mtp_train.trunk.precision import HALF_DTYPES
from mtp_train.upstream.transformers_private import torch_function_of

_LOG = logging.getLogger(__name__)

KERNEL_DEVICES = ("cuda", "xpu")
"""Types of the devices that the packages' kernels run on. ROCm's is ``cuda``."""
_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_WITH_GROUPED_HEADS = Version("0.5")
"""The first flash-linear-attention whose chunked Gated DeltaNet takes fewer key heads than value heads, as transformers
gives them. Earlier ones read past the keys."""


class ByTensor(NamedTuple):
    """A function of a recurrent layer that chooses between a package's kernel and torch in each call.

    Attributes:
        kernel: The model's function as transformers defines it, which calls the kernel.
        dtypes: The dtypes of a first argument on a suitable device that the kernel takes; None for all.
    """

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] | None

    def __call__(self, first: Tensor, *others: Any, **named: Any) -> Any:
        fits = first.device.type in KERNEL_DEVICES and (self.dtypes is None or first.dtype in self.dtypes)
        return (self.kernel if fits else self.plain)(first, *others, **named)


def choose_kernels(module: ModuleType, recurrent: RecurrentKernels | None) -> None:
    """Make the recurrent layers of a model's Python module choose their kernels in each call.

    Without any of the packages the module stays as it is. The change is for all models of the module, and for good.

    Args:
        recurrent: The names of its functions; None for a model without a recurrent state.
    """
    if not any(importlib.util.find_spec(package) for package in _PACKAGES):
        return
    for name in _CONVOLUTIONS:
        _choose(module, name)
    if recurrent is not None:
        _choose(module, recurrent.single)
        # Kernels of several tokens multiply matrices, for which Triton rounds fp32 inputs to TF32.
        _choose(module, recurrent.chunked, HALF_DTYPES if recurrent.rule != "gated_delta" or _groups_heads() else ())


def missing_kernels(recurrent: RecurrentKernels | None, device_type: str) -> str | None:
    """Return a sentence on flash-linear-attention, if it is missing and would run a trunk's layers on a device."""
    is_used = recurrent is not None and recurrent.rule == "gated_delta" and device_type in KERNEL_DEVICES
    if not is_used or importlib.util.find_spec("fla"):
        return None
    return (
        "flash-linear-attention is not installed: Gated DeltaNet layers run in torch. With it, a training step of "
        "Qwen3.5-9B took 0.86 s in place of 1.03 on one H100. Run pip install flash-linear-attention where you train."
    )


def _choose(module: ModuleType, name: str, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
    stock = getattr(module, name, None)
    if stock is not None and not isinstance(stock, ByTensor):
        setattr(module, name, ByTensor(stock, torch_function_of(stock), dtypes))


def _groups_heads() -> bool:
    """Return whether flash-linear-attention, if there is one, takes fewer key heads than value heads."""
    try:
        found = metadata.version("fla-core")
    except metadata.PackageNotFoundError:
        return True
    if Version(found) >= _WITH_GROUPED_HEADS:
        return True
    _LOG.warning(
        "flash-linear-attention %s: its chunked Gated DeltaNet takes no grouped heads; expected %s or later. Recurrent "
        "layers run in torch, many times slower. Run pip install -U flash-linear-attention.",
        found,
        _WITH_GROUPED_HEADS,
    )
    return False
