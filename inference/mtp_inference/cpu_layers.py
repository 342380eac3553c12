"""Run linear layers on a CPU faster than their modules do, in the rounds of a decoder.

A product of few rows takes the time of reading its matrix, and torch's own products read it at half the memory's rate
or less: MKL reorders an fp32 matrix in every call from two rows on, oneDNN a bf16 matrix from one row on. So the
matrices are kept in oneDNN's blocked layout, reordered once. The copies need as much memory as the matrices.

On an AMD EPYC (Zen 4) the packed product is faster for any number of rows; on Intel's CPUs, in fp32, it is slower for
one or two, which therefore stay torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp_train.trunk.precision import MEMORY_SHARE, main_memory_bytes, slow_halves

MIN_NUMBERS = 2**17
"""Numbers of the smallest matrix to reorder: for smaller ones, oneDNN's call takes longer than torch's product."""
ROWS_ON_INTEL = 3
"""Smallest number of fp32 rows of a packed product on Intel's CPUs."""
_PROBES = 64


class FastLinear:
    """The forward of a linear layer for few rows: a packed copy of the weight is made when it is first needed."""

    def __init__(self, layer: nn.Linear) -> None:
        # Past nn.Module's slow lookup of attributes: a round calls hundreds of layers.
        self._parameters: Mapping[str, Any] = layer._parameters
        is_fp32_on_intel = layer.weight.dtype is torch.float32 and not runs_on_amd()
        self._least_numbers = layer.in_features * (ROWS_ON_INTEL if is_fp32_on_intel else 1)
        self._packed: Tensor | None = None
        self._packed_from: tuple[Any, Tensor] | None = None

    def __call__(self, input: Tensor) -> Tensor:
        """Return the layer's output (..., O), contiguous, for an input (..., I)."""
        bias_O = self._parameters["bias"]
        if input.numel() < self._least_numbers:
            return linear(input, self._parameters["weight"], bias_O)
        if self._packed is None:
            weight = self._parameters["weight"]
            self._packed = pack(weight)
            self._packed_from = (_state(weight), _probe(weight))
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, bias_O, "none", [], "")

    def refresh(self) -> None:
        """Drop the copy if the weight has changed.

        torch counts changes in place, except those through ``weight.data``. Those are seen at 64 numbers of the matrix.
        """
        if self._packed_from is not None:
            (state, probe), weight = self._packed_from, self._parameters["weight"]
            if _state(weight) != state or not torch.equal(_probe(weight), probe):
                self._packed = self._packed_from = None


_forwards: WeakKeyDictionary[nn.Linear, FastLinear] = WeakKeyDictionary()
"""For the life of a layer, so that decoders of one model share the copies."""


class CpuLayers:
    """The linear layers of models that have a faster forward in rounds; none where the copies do not fit in memory.

    Args:
        models: The models; a layer in several of them is packed once. :func:`is_plain` chooses the layers.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        together = nn.ModuleList(models)
        large = [module for module in together.modules() if is_plain(module) and module.weight.numel() >= MIN_NUMBERS]
        # The models and the copies.
        num_bytes = sum(one.nbytes for one in [*together.parameters(), *(layer.weight for layer in large)])
        fits = num_bytes <= MEMORY_SHARE * main_memory_bytes()
        self.products = {layer: _forwards.setdefault(layer, FastLinear(layer)) for layer in large if fits}

    def refresh(self) -> None:
        for forward in self.products.values():
            forward.refresh()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the layers by their faster forwards inside this context."""
        # On the instance, and past nn.Module's own slow assignment: a context is entered in every round.
        for module, forward in self.products.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in self.products:
                module.__dict__.pop("forward", None)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer on an x86 CPU, in fp32 or in bf16 that the CPU multiplies natively.

    A layer whose ``forward`` was replaced, as accelerate's offloading does, is left alone.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and not slow_halves(module.weight.dtype, module.weight.device)
        and not module.weight.is_inference()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


def runs_on_amd() -> bool:
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


def pack(weight: Tensor) -> Tensor:
    """Return a copy of a matrix in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def _state(weight: Tensor) -> tuple[int, int, torch.Size]:
    return weight.data_ptr(), weight._version, weight.shape


def _probe(weight: Tensor) -> Tensor:
    numbers = weight.detach().flatten()
    return numbers[:: max(1, len(numbers) // _PROBES)].clone()
