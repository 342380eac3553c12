"""Fuse small operations on a GPU by torch.compile.

Between two matrix products a layer runs dozens of operations on the same numbers. Each is a launch, and reads and
writes all of them; Inductor makes one or two kernels of them. Norms, losses and parts of layers are compiled, no whole
layers: all layers share the kernels, and neither a mask nor a layer's place in the cache compiles them again.

Only on CUDA devices: on a CPU, a C++ compiler takes 3 to 20 seconds for each kernel. A kernel rounds less often than
the operations that it replaces, so in bf16 its results differ from theirs by rounding. torch's
``TORCHDYNAMO_DISABLE=1`` turns it off.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROW_NORM = re.compile(r"RMSNorm(Gated)?\Z")
"""transformers' names of norms over the last dimension. torch's own norms are one kernel already."""
_MOST_KERNELS = 64
"""Of one function, for other dtypes, widths and modes. Past torch's own limit of 8 it would run uncompiled."""
_PLAIN_MODULES = ("torch.nn.", "transformers.models.", "transformers.activations")
"""Where the classes of layers are that compile in one piece: no quantised layer, no adapter."""

Replaced = dict[nn.Module, type[nn.Module]]
"""Modules, and the classes whose forward they run instead of their own.

Classes: a forward of the instance would be another module's after a copy, and would keep its module alive.
"""


def compiles_on(device: torch.device) -> bool:
    """Return whether functions are compiled for a device."""
    return device.type == "cuda" and _can_compile(device.index or 0)


@functools.cache
def _can_compile(index: int) -> bool:
    """Compile a small function for a GPU; warn once if that fails, as without Triton or a C compiler."""
    try:
        torch.compile(lambda numbers: numbers.sin() * 2)(torch.ones(2, device=torch.device("cuda", index)))
    except Exception as error:
        reason = next(line for line in str(error).splitlines() if line)
        warnings.warn(f"torch.compile: {reason}. Small operations run one by one, which is slower.", stacklevel=2)
        return False
    return True


def num_graphs() -> int:
    """Return the number of graphs that were compiled so far: it grows while something is compiled again."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function, compiled if functions are compiled for the device."""
    return compiled(function) if compiles_on(device) else function


@functools.cache
def compiled(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """Return a compiled function; its first call compiles it.

    Args:
        dynamic: Whether its kernels take any number of rows; None compiles for the first number, then for any.
    """
    torch._dynamo.config.recompile_limit = max(_MOST_KERNELS, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=dynamic)


def compilable(wanted: Replaced, device: torch.device) -> Replaced:
    """Return those of a model's modules that are plain, if its device compiles; warn if others are beside them."""
    if not compiles_on(device):
        return {}
    found = {module: other for module, other in wanted.items() if _is_plain(module)}
    if len(found) < len(wanted):
        warnings.warn(
            f"torch.compile: {len(wanted) - len(found)} of {len(wanted)} norms, MLPs and the like are quantised, "
            "adapted or offloaded. They run eagerly, which is slower.",
            stacklevel=2,
        )
    return found


def _is_plain(module: nn.Module) -> bool:
    return all(
        type(part).__module__.startswith(_PLAIN_MODULES) and "forward" not in vars(part) for part in module.modules()
    ) and all(compiles_on(one.device) for one in module.parameters())


def row_norms(modules: Iterable[Any]) -> Replaced:
    """Return the norms among modules, which can run in one kernel each."""
    norms = (module for module in modules if _ROW_NORM.search(type(module).__name__))
    return {module: by_rows(module.__class__) for module in norms}


@functools.cache
def by_rows(stock: type[Any]) -> type[nn.Module]:
    """Return a class of modules that run another's forward compiled, for tensors that have rows of one width.

    The rows come in one dimension: the shape before it compiles nothing again.
    """

    def forward(module: nn.Module, hidden: Tensor, *others: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            # With the layer around it.
            return stock.forward(module, hidden, *others)
        rows = (one.reshape(-1, one.shape[-1]) for one in (hidden, *others))
        return compiled(stock.forward, dynamic=True)(module, *rows).unflatten(0, hidden.shape[:-1])

    return subclass(stock, forward)


def subclass(stock: type[Any], forward: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of the same name with another forward."""
    return type(stock.__name__, (stock,), {"forward": forward, "__module__": stock.__module__})


def replace_forwards(replaced: Replaced) -> None:
    """Make modules run the forwards of other classes from now on."""
    for module, other in replaced.items():
        module.__class__ = other


@contextmanager
def replaced_forwards(replaced: Replaced) -> Iterator[None]:
    """Make modules run the forwards of other classes inside this context."""
    stock = {module: type(module) for module in replaced}
    replace_forwards(replaced)
    try:
        yield
    finally:
        replace_forwards(stock)
