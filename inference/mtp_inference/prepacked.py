"""Multiply few rows by large fp32 matrices faster than torch does, in the rounds of a decoder on a CPU.

A product of few rows takes the time of reading its matrix. From four rows on, torch reorders the matrix in every call,
which takes as long again: a verify window of three drafts is such a product. So the matrices are kept in oneDNN's
blocked layout. Reordered once, the products of 4 to 16 rows take two thirds of the time (Emerald Rapids, one thread).
The copies need as much memory as the matrices.

One or two rows take as long either way on Emerald Rapids. On an AMD EPYC, MKL and oneDNN read the matrix at half the
rate or less then. MKL reads it at 1.2 to 1.7 times their rate if it multiplies the matrix by two columns instead, which
needs no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp_train.trunk.precision import MEMORY_SHARE, main_memory_bytes

MIN_NUMBERS = 2**19
"""Numbers of the smallest matrix to reorder: smaller ones stay in the cache, and the call costs more than the copy."""
COLUMNS = 2
"""Largest number of rows that are multiplied as columns."""
MIN_NUMBERS_BY_COLUMNS = 2**16
"""Numbers of the smallest matrix to multiply by columns: for smaller ones, the call takes longer than the product."""
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
        models: The models whose layers to multiply with; a layer in several of them is packed once. Only plain
            ``nn.Linear`` layers in fp32 on a CPU are included, and packed only where all copies fit in memory.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        plain = dict.fromkeys(module for model in models for module in model.modules() if is_plain(module))
        large = [layer for layer in plain if layer.weight.numel() >= MIN_NUMBERS]
        # The models and the copies.
        held = {parameter for model in models for parameter in model.parameters()}
        numbers = sum(one.numel() for one in held) + sum(layer.weight.numel() for layer in large)
        self.packed = set(large) if 4 * numbers <= MEMORY_SHARE * main_memory_bytes() else set()
        self.by_columns = columns_are_faster()
        self.layers = [
            layer
            for layer in plain
            if layer in self.packed or (self.by_columns and layer.weight.numel() >= MIN_NUMBERS_BY_COLUMNS)
        ]

    def refresh(self) -> None:
        """Drop the copies of weights that have changed."""
        for layer in self.layers:
            pack = _packs.get(layer)
            if pack is not None and not pack.is_of(layer):
                del _packs[layer]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Multiply with packed weights, or by columns, inside this context."""
        # On the instance, and past nn.Module's own slow assignment: a context is entered in every round.
        for layer in self.layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Linear, input: Tensor) -> Tensor:
        num_rows = input.shape[:-1].numel()
        if self.by_columns and 0 < num_rows <= COLUMNS:
            return _product_by_columns(layer, input, num_rows)
        if layer not in self.packed:
            return linear(input, layer.weight, layer.bias)
        pack = _packs.get(layer)
        if pack is None:
            pack = _packs[layer] = Pack(layer)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, pack.packed, layer.bias, "none", [], "")
        return product


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer in fp32 on an x86 CPU.

    A layer whose ``forward`` was replaced, as accelerate's offloading does, is left alone.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.float32
        and not module.weight.is_inference()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


def columns_are_faster() -> bool:
    """Return whether one or two rows are multiplied faster as columns: on AMD's CPUs, by measurements on an EPYC."""
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


def _product_by_columns(layer: nn.Linear, input: Tensor, num_rows: int) -> Tensor:
    rows_CI = input.reshape(num_rows, -1)
    if num_rows < COLUMNS:
        # One column is a product of a matrix and a vector, which is the slow one.
        rows_CI = rows_CI.repeat(COLUMNS, 1)
    product_CO = (layer.weight @ rows_CI.T).T[:num_rows].contiguous()
    if layer.bias is not None:
        product_CO += layer.bias
    return product_CO.view(*input.shape[:-1], -1)


def _state(weight: Tensor) -> tuple[int, int, torch.Size]:
    return weight.data_ptr(), weight._version, weight.shape


def _probe(weight: Tensor) -> Tensor:
    numbers = weight.detach().flatten()
    return numbers[:: max(1, len(numbers) // _PROBES)].clone()
