"""Run linear layers and norms on a CPU faster than their modules do, in the rounds of a decoder.

A product of few rows takes the time of reading its matrix, and torch's own products read it at half the memory's rate
or less: MKL reorders an fp32 matrix in every call from two rows on, oneDNN a bf16 matrix from one row on. So the
matrices are kept in oneDNN's blocked layout, reordered once. The copies need as much memory as the matrices.

The fastest way depends on the number of rows, on the matrix and on the processor:

- "Packed" is the product with the reordered matrix. On an Intel Xeon (Emerald Rapids) it takes two thirds of the time
  of torch's product for 4 to 16 rows, and as long for one or two.
- "Padded": oneDNN's AVX-512 kernels multiply four rows faster than one or two on an AMD EPYC (Zen 4), so fewer rows are
  padded.
- "Columns" multiplies the matrix by the transposed rows, on AMD's CPUs. It needs no copy, and is the fastest way for
  one or two rows if the input is narrow or the matrix small.

Norms of a few rows take the time of their calls: see :func:`mtp_inference.cpu_norms.brief_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mtp_inference.cpu_norms import brief_norm
from mtp_train.trunk.precision import MEMORY_SHARE, bf16_support, main_memory_bytes

MIN_NUMBERS = 2**17
"""Numbers of the smallest matrix to reorder: for smaller ones, oneDNN's call takes longer than torch's product."""
PADDED_ROWS = 4
"""Number of rows that fewer rows are padded to."""
COLUMNS = 2
"""Largest number of rows that are multiplied as columns."""
COLUMNS_WIDTH, COLUMNS_NUMBERS = 1024, 2**20
"""A matrix is multiplied as columns if its input is at most this wide, or if it has at most so many numbers: oneDNN's
call then takes longer."""
COLUMNS_WIDTH_IF_PADDED = 512
"""The same width where rows can be padded instead."""
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


class FastLinear:
    """The forward of a linear layer for few rows.

    Args:
        layer: The layer. Its weight is read at each call.
        packs: Whether to multiply a packed copy of the weight, made when it is first needed.
        by_columns: Whether to multiply one or two rows as columns.
        pads: Whether to pad fewer than ``PADDED_ROWS`` rows of a packed product.
    """

    def __init__(self, layer: nn.Linear, *, packs: bool, by_columns: bool, pads: bool) -> None:
        self._layer = layer
        self._width = layer.in_features
        # Past nn.Module's slow lookup of attributes: a round calls hundreds of layers.
        self._parameters: Mapping[str, Any] = layer._parameters
        self.packs = packs
        self.by_columns = by_columns
        self.pads = pads

    def __call__(self, input: Tensor) -> Tensor:
        """Return the layer's output (..., O), contiguous, for an input (..., I)."""
        num_rows = input.numel() // self._width
        weight_OI, bias_O = self._parameters["weight"], self._parameters["bias"]
        if self.by_columns and 0 < num_rows <= COLUMNS:
            return _product_by_columns(input, weight_OI, bias_O, num_rows)
        if not self.packs:
            return linear(input, weight_OI, bias_O)
        pack = _packs.get(self._layer)
        if pack is None:
            pack = _packs[self._layer] = Pack(self._layer)
        if not self.pads or not 0 < num_rows < PADDED_ROWS - 1:
            return _packed_product(input, pack.packed, bias_O)
        rows_RI = input.reshape(num_rows, self._width)
        padded_RO = _packed_product(torch.cat([rows_RI] * (PADDED_ROWS // num_rows)), pack.packed, bias_O)
        return padded_RO[:num_rows].view(*input.shape[:-1], -1)


class CpuLayers:
    """The linear layers and norms of models that have a faster forward in rounds.

    Args:
        models: The models; a layer in several of them is packed once. Linear layers are included as
            :func:`is_plain` says, and packed only where all copies fit in memory.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        plain = [module for module in modules if is_plain(module)]
        large = {layer for layer in plain if layer.weight.numel() >= MIN_NUMBERS}
        # The models and the copies.
        held = {parameter for model in models for parameter in model.parameters()}
        num_bytes = sum(one.nbytes for one in held) + sum(layer.weight.nbytes for layer in large)
        self.packed = large if num_bytes <= MEMORY_SHARE * main_memory_bytes() else set()
        is_amd = runs_on_amd()
        pads = is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512"
        self.products: dict[nn.Linear, FastLinear] = {}
        for layer in plain:
            packs = layer in self.packed
            by_columns = is_amd and multiplies_by_columns(layer, pads=packs and pads)
            if packs or by_columns:
                self.products[layer] = FastLinear(layer, packs=packs, by_columns=by_columns, pads=pads)
        norms = {module: brief_norm(module) for module in modules}
        self._forwards: dict[nn.Module, Callable[..., Tensor]] = {
            module: forward for module, forward in (*self.products.items(), *norms.items()) if forward is not None
        }

    def refresh(self) -> None:
        """Drop the copies of weights that have changed."""
        for layer in self.products:
            pack = _packs.get(layer)
            if pack is not None and not pack.is_of(layer):
                del _packs[layer]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the layers by their faster forwards inside this context."""
        # On the instance, and past nn.Module's own slow assignment: a context is entered in every round.
        for module, forward in self._forwards.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in self._forwards:
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
        and _is_fast(module.weight.dtype)
        and not module.weight.is_inference()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


def _is_fast(dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bf16_support(torch.device("cpu"))[0])


def runs_on_amd() -> bool:
    """Return whether the processor is AMD's: one or two rows are multiplied in other ways there."""
    return "AMD" in torch.cpu.get_capabilities().get("cpu_name", "")


def multiplies_by_columns(layer: nn.Linear, *, pads: bool) -> bool:
    """Return whether one or two rows are multiplied faster as columns on AMD's CPUs, if they can be padded or not."""
    numbers, widest = layer.weight.numel(), COLUMNS_WIDTH_IF_PADDED if pads else COLUMNS_WIDTH
    is_narrow = layer.in_features <= widest or numbers <= COLUMNS_NUMBERS
    return is_narrow and layer.weight.dtype is torch.float32 and numbers >= MIN_NUMBERS_BY_COLUMNS


def _packed_product(input: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias_O, "none", [], "")
    return product


def _product_by_columns(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None, num_rows: int) -> Tensor:
    rows_CI = input.reshape(num_rows, -1)
    if num_rows < COLUMNS:
        # One column is a product of a matrix and a vector, which is the slow one.
        rows_CI = torch.cat((rows_CI, rows_CI))
    product_CO = torch.mm(weight_OI, rows_CI.t()).t()[:num_rows].contiguous()
    if bias_O is not None:
        product_CO += bias_O
    return product_CO.view(*input.shape[:-1], -1)


def _state(weight: Tensor) -> tuple[int, int, torch.Size]:
    return weight.data_ptr(), weight._version, weight.shape


def _probe(weight: Tensor) -> Tensor:
    numbers = weight.detach().flatten()
    return numbers[:: max(1, len(numbers) // _PROBES)].clone()
