"""How far apart rounding alone can bring two computations of the same values.

Another batch shape, kernel, processor or number of threads sums the same terms in another order. A sum of n terms is
then off by at most n times the dtype's unit of rounding (eps), relative to the largest value. A forward sums the inputs
of each of its matrices, one matrix after another. Tests compare with that bound, and their negative controls exceed it
``FAR`` times, so that neither depends on the machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROWTH = 8.0
"""How much rounding may grow on its way: a score of size s that is off by eps moves its exponential by s * eps."""
FAR = 20.0
"""How many bounds a wrong value is off, at least. In the tiny random models of these tests it is some hundreds."""


def num_terms(*modules: nn.Module) -> int:
    """Return how many terms a forward sums one after another: the inputs of every matrix."""
    return sum(weight.shape[-1] for module in modules for weight in module.parameters() if weight.ndim > 1)


def rounding(expected: Tensor | float, terms: int, dtype: torch.dtype | None = None) -> float:
    """Return the largest difference that rounding explains.

    Args:
        expected: The values, or the size of the largest.
        terms: How many terms were summed one after another, see :func:`num_terms`.
        dtype: What was computed in; None is that of ``expected``, fp32 of a size.
    """
    if isinstance(expected, Tensor):
        dtype = dtype or expected.dtype
        size = float(expected.abs().max())
    else:
        dtype = dtype or torch.float32
        size = abs(expected)
    return GROWTH * terms * torch.finfo(dtype).eps * size


def rounding_of_mean(size: float, count: int, dtype: torch.dtype) -> float:
    """Return how far rounding moves a mean of ``count`` values of this size that are off by eps independently.

    For half precision: its products are summed in fp32, so that the number of terms does not matter.
    """
    return abs(size) * torch.finfo(dtype).eps / count**0.5


def assert_same(found: Tensor, expected: Tensor, terms: int, dtype: torch.dtype | None = None) -> None:
    """Assert that two results differ by rounding alone."""
    torch.testing.assert_close(found, expected, atol=rounding(expected, terms, dtype), rtol=0)


def assert_differs(found: Tensor, expected: Tensor, terms: int, dtype: torch.dtype | None = None) -> None:
    """Assert that results differ by far more than rounding: the control beside :func:`assert_same`."""
    difference = float((found - expected).abs().max())
    bound = FAR * rounding(expected, terms, dtype)
    assert difference > bound, f"differs by {difference:.1e}; expected more than {bound:.1e}"
