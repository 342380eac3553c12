"""Keep large fp32 matrices in oneDNN's blocked layout for the rounds of a decoder on a CPU.

A product of few rows takes the time of reading its matrix. From four rows on, torch reorders the matrix in every call,
which takes as long again: a verify window of three drafts is such a product. Reordered once, the products of 4 to 16
rows take two thirds of the time (Emerald Rapids, one thread). On an AMD EPYC, torch's own products of one to three rows
are slower than the reordered ones, too: with one row, MKL reads the matrix at half the rate. On Emerald Rapids, one row
takes as long either way. The copies need as much memory as the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mtp_train.trunk.precision import MEMORY_SHARE, main_memory_bytes

MIN_NUMBERS = 2**19
"""Numbers of the smallest matrix to reorder: smaller ones stay in the cache, and the call costs more than the copy."""
_PROBES = 64


class Pack:
    """A layer's weight in oneDNN's layout, and what tells that the weight has changed since."""

    def __init__(self, layer: nn.Linear) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self._state, self._probe = _state(layer.weight), _probe(layer.weight)

    def is_of(self, layer: nn.Linear) -> bool:
        """Return whether the layer still has the weight that was packed.

        torch counts changes in place, except those through ``weight.data``. Those are seen at 64 numbers of the matrix.
        """
        return _state(layer.weight) == self._state and torch.equal(_probe(layer.weight), self._probe)


_packs: WeakKeyDictionary[nn.Linear, Pack] = WeakKeyDictionary()
"""For the life of a layer, so that decoders of one model share the copies."""


class PrepackedLinears:
    """Linear layers of models, with their weights packed when a round first needs them.

    Args:
        models: The models whose layers to pack; a layer in several of them is packed once. Only plain ``nn.Linear``
            layers in fp32 on a CPU are packed, and only where all copies fit in memory.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        layers = dict.fromkeys(module for model in models for module in model.modules() if can_pack(module))
        # The models and the copies.
        held = {parameter for model in models for parameter in model.parameters()}
        numbers = sum(one.numel() for one in held) + sum(layer.weight.numel() for layer in layers)
        self.layers: list[nn.Linear] = list(layers) if 4 * numbers <= MEMORY_SHARE * main_memory_bytes() else []

    def refresh(self) -> None:
        """Drop the copies of weights that have changed."""
        for layer in self.layers:
            pack = _packs.get(layer)
            if pack is not None and not pack.is_of(layer):
                del _packs[layer]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Multiply with packed weights inside this context."""
        # On the instance, and past nn.Module's own slow assignment: a context is entered in every round.
        for layer in self.layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Linear, input: Tensor) -> Tensor:
        pack = _packs.get(layer)
        if pack is None:
            pack = _packs[layer] = Pack(layer)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, pack.packed, layer.bias, "none", [], "")
        return product


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer that packing makes faster: large, in fp32, on an x86 CPU.

    A layer whose ``forward`` was replaced, as accelerate's offloading does, is left alone.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.float32
        and not module.weight.is_inference()
        and bool(module.weight.numel() >= MIN_NUMBERS)
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


def _state(weight: Tensor) -> tuple[int, int, torch.Size]:
    return weight.data_ptr(), weight._version, weight.shape


def _probe(weight: Tensor) -> Tensor:
    numbers = weight.detach().flatten()
    return numbers[:: max(1, len(numbers) // _PROBES)].clone()
