"""Record the matrix products of a piece of work, and repeat them alone: the least time that the work can take.

A product is recorded with the shapes, strides and dtypes of its matrices, forward and backward. The repetition computes
nothing else. Matrices that shared memory share it again, so caches are as warm as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_ADDING = (_ATEN.addmm, _ATEN.baddbmm)
# Inference mode shows linear layers and `matmul` whole.
PRODUCTS = frozenset({_ATEN.mm, _ATEN.bmm, *_ADDING, _ATEN.linear, _ATEN.matmul, _ATEN._grouped_mm})
"""Operations that are recorded, also those into a given tensor. Fused attention and convolutions are not."""


class Operand(NamedTuple):
    """The memory of a matrix during the recorded work."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def extent(self) -> int:
        """Numbers from the first to the last one, those between rows included."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class Product(NamedTuple):
    """One matrix product."""

    operation: Callable[..., Tensor]
    operands: tuple[Operand, ...]
    """The matrices, with the addend of ``addmm`` and the bias of ``linear``."""
    options: Mapping[str, Any]
    """Factors by name, as ``out`` the operand that the product is written into, and as ``offs`` the ends of the groups
    of a grouped product."""

    @property
    def tensors(self) -> list[Operand]:
        """All operands, the one of the result included."""
        return [*self.operands, *(one for one in self.options.values() if isinstance(one, Operand))]

    @property
    def flops(self) -> int:
        """Multiplications and additions, without those of an addend."""
        left, right = self.operands[1:] if self.operation in _ADDING else self.operands[:2]
        columns = right.shape[0] if self.operation is _ATEN.linear else right.shape[-1]
        return 2 * math.prod(left.shape) * columns


class RecordedProducts(TorchDispatchMode):
    """Record the matrix products inside the block, in order, as ``products``."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and record it if it is a product."""
        given = kwargs or {}
        if func.overloadpacket in PRODUCTS:
            # An absent bias is None.
            tensors = [one for one in args if isinstance(one, Tensor)]
            operands = tuple(_operand(one) for one in tensors if one.is_floating_point())
            options = {name: _operand(one) if isinstance(one, Tensor) else one for name, one in given.items()}
            ends = [one.clone() for one in tensors if not one.is_floating_point()]
            options |= {"offs": ends[0]} if ends else {}
            if all(math.prod(one.shape) for one in operands):
                self.products.append(Product(func.overloadpacket, operands, options))
        return func(*args, **given)


def recorded(work: Callable[[], object]) -> list[Product]:
    """Run a piece of work once; return its matrix products."""
    with RecordedProducts() as record:
        work()
    return record.products


class Replay:
    """The recorded products alone, on random matrices in the same layouts; call it to compute them.

    Args:
        products: The products of :func:`recorded`.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        extents: dict[tuple[int, torch.dtype], int] = {}
        for operand in (one for product in products for one in product.tensors):
            key = operand.address, operand.dtype
            extents[key] = max(extents.get(key, 0), operand.extent)
        device = products[0].operands[0].device
        # Normal numbers: products of denormal ones take longer.
        memory = {key: torch.randn(extent, dtype=key[1], device=device) for key, extent in extents.items()}

        def filled(value: Any) -> Any:
            if not isinstance(value, Operand):
                return value
            return memory[value.address, value.dtype].as_strided(value.shape, value.stride)

        self.calls = [
            partial(
                product.operation,
                *map(filled, product.operands),
                **{name: filled(value) for name, value in product.options.items()},
            )
            for product in products
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Compute the products in their order."""
        for call in self.calls:
            call()


def _operand(tensor: Tensor) -> Operand:
    return Operand(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
