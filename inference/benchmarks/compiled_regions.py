"""Count what torch.compile leaves of a function, on the meta device, for ``count.py``.

A compiled function counts the kernels that are left after Inductor's fusion, compiled for a CPU up to its scheduler, as
one launch each. What Inductor does for CPUs alone is left out: it copies the parts of a concatenation one by one, and
writes exponentials to memory that several operations read. Bytes are what kernels read and write; one that loops over a
row several times, as softmax does, reads in each loop what the loop needs, as a GPU does with rows of a vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.ir import MultiOutput, Pointwise, Reduction, StorageBox
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from mtp_train.upstream.transformers_private import replacing

CPU = torch.device("cpu")


class Kernel(NamedTuple):
    nbytes: int
    flop: int | None
    """None where it is no product."""


class _Scheduled(Exception):
    """Ends a compilation before code is written."""


def _is_kept(box: StorageBox, users: int, *, graph_reuse: bool = True) -> bool:
    """Return whether an intermediate result is written to memory; StorageBox's own method keeps more on a CPU."""
    if users < 2 or not isinstance(box.data, Pointwise | Reduction):
        return False
    return box.has_large_inner_fn() or (graph_reuse and box.num_reads() > config.realize_reads_threshold)


def kernels(graph: GraphModule, inputs: Sequence[Any]) -> list[Kernel]:
    """Return the kernels that Inductor makes of a graph for a CPU, with inputs of these shapes."""
    found: list[Kernel] = []

    def take(nodes: Sequence[Any]) -> None:
        for node in nodes:
            if not (isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput)):
                loops = node.get_outer_nodes() if isinstance(node, OuterLoopFusedSchedulerNode) else [node]
                nbytes = sum(loop.get_read_write_buffers_sizes() for loop in loops)
                found.append(Kernel(nbytes, node.estimate_flops()))
        raise _Scheduled

    with torch._C.DisableTorchFunction(), _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        graph = copy.deepcopy(graph)
        for node in graph.graph.nodes:
            if isinstance(node.kwargs.get("device"), torch.device):
                node.kwargs = {**node.kwargs, "device": CPU}
        graph.recompile()
        on_cpu = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) if isinstance(one, Tensor) else one
            for one in inputs
        ]
        traced = make_fx(lambda *args: tree_leaves(graph(*args)))(*on_cpu)
        with (
            config.patch(_post_fusion_custom_pass=take, fx_graph_cache=False, force_pointwise_cat=True),
            replacing(StorageBox, should_realize_on_reuse=_is_kept),
        ):
            try:
                compile_fx_inner(traced, on_cpu)
            except (InductorError, _Scheduled) as error:
                if not isinstance(getattr(error, "inner_exception", error), _Scheduled):
                    raise
    return found


class Regions:
    """Run functions as torch.compile would, and note the kernels of each call, those of its backward pass too.

    No operation inside a function reaches a dispatch mode outside.
    """

    def __init__(self, note: Callable[[list[Kernel]], None]) -> None:
        self._note = note
        self._traced: dict[Any, Callable[..., Any]] = {}
        self._is_tracing = False

    def compiled(self, function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
        """Return a function that does what another one does, and notes its kernels."""
        return partial(self._call, function)

    def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._is_tracing:
            # Compiled with the function around it.
            return function(*args, **named)
        leaves, spec = tree_flatten((args, named))
        modules = [one for one in leaves if isinstance(one, nn.Module)]
        weights = [dict([*module.named_parameters(), *module.named_buffers()]) for module in modules]
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        tensors += [weight for of_module in weights for weight in of_module.values()]
        others = tuple(one for one in leaves if not isinstance(one, Tensor | nn.Module))
        shapes = tuple((one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors)
        key = function, shapes, others, torch.is_grad_enabled()
        self._is_tracing = key not in self._traced
        if self._is_tracing:
            self._traced[key] = _traced(function, leaves, spec, weights, self._noting)
        try:
            with (
                torch._C.DisableTorchFunction(),
                _disable_current_modes(),
                replacing(torch.compiler, _is_compiling_flag=True),
            ):
                return self._traced[key](*tensors)
        finally:
            self._is_tracing = False

    def _noting(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph to a function that runs it and notes its kernels."""
        found = kernels(graph, inputs)

        def run(*args: Any) -> Any:
            self._note(found)
            with _disable_current_modes():
                return graph(*args)

        return make_boxed_func(run)


def _traced(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    spec: TreeSpec,
    weights: Sequence[dict[str, Tensor]],
    compiler: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function of the tensors among ``leaves``, then of the weights of its modules."""
    results: list[TreeSpec] = []

    def flat(*numbers: Tensor) -> list[Any]:
        left = iter(numbers)
        given = [next(left) if isinstance(one, Tensor) else one for one in leaves]
        modules = [one for one in leaves if isinstance(one, nn.Module)]
        with ExitStack() as stack:
            for module, names in zip(modules, weights, strict=True):
                stack.enter_context(_reparametrize_module(module, {name: next(left) for name in names}))
            args, named = tree_unflatten(given, spec)
            found, shape = tree_flatten(function(*args, **named))
        results.append(shape)
        return found

    compiled = aot_function(
        flat,
        compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return lambda *tensors: tree_unflatten(compiled(*tensors), results[0])
