#!/usr/bin/env python
"""Count the launches, bytes and operations of decoding rounds and of a training step, without a GPU.

    python inference/benchmarks/count.py                         # the demo's shape
    python inference/benchmarks/count.py --config config.json    # any model with a head, such as qwen3_5_9b.json here
    python inference/benchmarks/count.py --eager                 # nothing compiled

The product's own round and training step run on torch's meta device, in bf16, and every operation of torch is counted:

- A launch is an operation that writes a tensor. Views and allocations launch nothing. A function that the product
  compiles on a GPU counts the kernels that Inductor makes of it (``compiled_regions.py``).
- Bytes are the tensors that an operation reads and writes; of a lookup, the rows that it reads.
- Products are matrix products, attention and convolutions, whose FLOPs are counted. Attention is one kernel: flash
  without a mask, else the memory-efficient one. Causal attention counts in full, as in torch's ``flop_counter``. Of
  experts, as many are read as there are rows.
- Autocast casts the inputs of products.
- In training, the rule of Gated DeltaNet counts as in flash-linear-attention, under ``published``: eight kernels, and
  8 FLOPs for each token and number of the recurrent state, as Megatron-LM counts it.
- AdamW is one fused kernel. Chunks of the loss have the fewest rows (``losses/chunked.py``).

Layers that read the values of tensors (``nonzero``) cannot run on the meta device. The output is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from compiled_regions import Kernel, Regions
from cpu import Row, documents
from gpu import random_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import mtp_train
from mtp_inference import Sampling, SpeculativeDecoder
from mtp_inference.batch import Batch
from mtp_inference.capture import round_up
from mtp_inference.compiled_layers import CompiledLayers
from mtp_inference.drafters.drafter import BatchSize, RoundPlan
from mtp_inference.round import prefill, run_round
from mtp_train.heads import experts
from mtp_train.train import head_training
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.trunk import states
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import Segment, TrunkStates
from mtp_train.upstream import compiled
from mtp_train.upstream.compiled import compilable, replace_forwards, row_norms
from mtp_train.upstream.transformers_private import replacing

aten = torch.ops.aten
META, DTYPE = torch.device("meta"), torch.bfloat16
CONTEXT, SEQ_LEN, DEPTH = 1024, 2048, 3
DEMO = Path(mtp_train.__file__).parent / "demo_assets" / "base" / "config.json"
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Read as many numbers of their first tensor as they write."""
PLACED = {"index_put_", "index_put", "scatter_", "scatter", "index_copy_"}
"""Write as many numbers of their first tensor as their last one has."""
OVERWRITES = {"copy_", "fill_", "zero_"}
"""Do not read their first tensor."""
KINDS = {
    "norm": "Norm",
    "delta_net": "Delta(Net|Attention)|Mamba|LinearAttention",
    "attention": "Attention",
    "mlp": "(MLP|Mlp|MoE|MoeBlock|Experts|Router|FeedForward)$",
    "rotary": "Rotary",
    "embedding": "Embedding$",
}
"""Kind of a module to names of its class; the innermost module of a kind decides."""
RULE_KERNELS = 8
"""Of ``fla/ops/gated_delta_rule/chunk.py``: two norms, the sum of decays, keys by keys, the triangular solve, w and u,
the states, and the output."""


def row_of(count: Counter[str]) -> Row:
    gigabytes, teraflop = round(count["nbytes"] / 1e9, 6), round(count["flop"] / 1e12, 6)
    return {"launches": count["launches"], "gigabytes": gigabytes, "teraflop": teraflop}


def stored(tensor: Tensor) -> int:
    """Return the bytes of a tensor; numbers that ``expand`` repeats count once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in steps if stride or not size) * tensor.itemsize


def moved(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    if name in LOOKUPS:
        inputs = [*outputs, *inputs[1:]]
    elif name in PLACED:
        inputs, outputs = inputs[1:], inputs[-1:]
    elif name in OVERWRITES:
        inputs = inputs[1:]
    elif "_grouped_mm" in name and inputs[1].ndim == 3:
        # The matrices of no more experts than rows.
        inputs = [inputs[0], inputs[1][: inputs[0].shape[-2]]]
    return sum(map(stored, [*inputs, *outputs]))


def is_launch(func: Any, outputs: Sequence[Tensor]) -> bool:
    """Return whether an operation launches a kernel: it writes numbers, and returns no view of another tensor."""
    return not func.is_view and func.__name__.split(".")[0] not in ALLOCATIONS and any(one.numel() for one in outputs)


def product_flop(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the FLOPs of a product; None for any other operation."""
    if "scaled_dot_product" in str(func):
        # The gradient of the output comes first. Backward: the scores, and two products for each of the two forward.
        is_backward = "backward" in str(func)
        query, key, value = args[is_backward : 3 + is_backward]
        forward = 2 * prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
        return forward * 5 // 2 if is_backward else forward
    if "_grouped_mm" in str(func):
        # The rows of all experts together; in the backward pass, an output for each expert.
        return 2 * prod(result.shape[-2:]) * args[0].shape[-1]
    formula = flop_registry.get(func._overloadpacket)
    return None if formula is None else formula(*args, **kwargs, out_val=result)


class Counting(TorchDispatchMode):
    """Count every operation inside the block, by module.

    Args:
        eager: Compile nothing.
    """

    def __init__(self, lm_head: nn.Module, eager: bool = False) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.eager = eager
        self.part = "other"
        """The part of the round or of the step that runs, see :meth:`of`."""
        self.parts: dict[str, Counter[str]] = defaultdict(Counter)
        self.products: Counter[str] = Counter()
        self._modules: list[nn.Module] = []
        self._regions = Regions(self._note_kernels)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count the operations inside this context, and note which modules run."""
        push = register_module_forward_pre_hook(lambda module, _inputs: self._modules.append(module))
        # Also where the module ends by an exception.
        pop = register_module_forward_hook(self._leave, always_call=True)
        with push, pop, self:
            yield

    def _leave(self, *_unused: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # An operation that is made of others counts as these.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        inputs, outputs = ([one for one in tree_leaves(each) if isinstance(one, Tensor)] for each in (args, result))
        # AdamW's kernel returns nothing.
        outputs = outputs or (inputs if func._schema.is_mutable else [])
        # Numbers of the host, such as a step's, are tensors of the CPU.
        if is_launch(func, [one for one in outputs if one.is_meta]):
            nbytes = moved(func.__name__.split(".")[0], inputs, outputs)
            self.note(self._name(), 1, nbytes, product_flop(func, args, kwargs, result))
        return result

    def compiling(self) -> AbstractContextManager[None]:
        """Count what a GPU compiles as compiled inside this context."""
        return replacing(compiled, compiles_on=lambda _device: not self.eager, compiled=self._regions.compiled)

    def _note_kernels(self, found: Sequence[Kernel]) -> None:
        for kernel in found:
            self.note(self._name(), 1, kernel.nbytes, kernel.flop)

    def note(self, name: str, launches: int, nbytes: int, flop: int | None) -> None:
        """Count launches of a part, as products if they have FLOPs."""
        count = {"launches": launches, "nbytes": nbytes, "flop": flop or 0}
        self.parts[name].update(count)
        if flop is not None:
            self.products.update(count)

    def _name(self) -> str:
        """Return the name of the part that runs, with the kind of its module."""
        for module in reversed(self._modules):
            if module is self.lm_head:
                return f"{self.part}: lm_head"
            for kind, names in KINDS.items():
                if re.search(names, type(module).__name__):
                    return f"{self.part}: {kind}"
        return self.part

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose operations are counted as a part's."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return counted

    def row(self) -> Row:
        """Return the totals and the parts for the JSON document."""
        total = sum(self.parts.values(), Counter())
        parts = sorted(self.parts.items(), key=lambda part: -part[1]["launches"])
        return {
            **row_of(total),
            "products": row_of(self.products),
            "by_module": {name: row_of(count) for name, count in parts},
        }


class OnGpu(TorchFunctionMode):
    """Attend, and cast the inputs of products, as a GPU's kernels and autocast do.

    The meta device has no autocast, and an operation for each step of attention. The arguments are those of
    ``torch.autocast``. A parameter is cast once.
    """

    PRODUCTS = ("linear", "scaled_dot_product_attention", "matmul", "__matmul__", "mm", "bmm", "baddbmm")

    def __init__(self, _device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> None:
        super().__init__()
        self.dtype = dtype if enabled else None
        self._cast: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.dtype is not None and func.__name__ in self.PRODUCTS:
            args = [self._as(one) if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
        if func is nn.functional.scaled_dot_product_attention:
            func = self.attend
        return func(*args, **kwargs or {})

    def _as(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(self.dtype)
        if tensor not in self._cast:
            self._cast[tensor] = tensor.to(self.dtype)
        return self._cast[tensor]

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_unused: Any) -> Tensor:
        if attn_mask is None and query.shape[3] == value.shape[3]:
            return aten._scaled_dot_product_flash_attention(query, key, value)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # As on a GPU, one kernel: the constant is of the host.
            attn_mask = torch.where(attn_mask, query.new_empty(()), -torch.inf)
        return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, query.requires_grad)[0]


def count_round(model: SpeculativeDecoder, depth: int, eager: bool = False) -> Counting:
    """Count a round of one text, after a prompt of ``CONTEXT`` tokens."""
    size = BatchSize(1, CONTEXT + 64, depth, max_window=CONTEXT, num_stops=1)
    counting = Counting(model.trunk.causal_lm.get_output_embeddings(), eager)
    with META, OnGpu("meta"), counting.compiling():
        layers = CompiledLayers([model.trunk.causal_lm, model.drafting.head], model.trunk.family)
        batch = Batch(model.trunk, model.drafting, size, layers=layers)
        batch.set_rows(slice(0, 1), [Sampling()], [CONTEXT], [frozenset()])
        prefill(batch, slice(0, 1), torch.zeros(1, CONTEXT, dtype=torch.long))
        for owner, name, part in (
            (batch, "run_window", "trunk"),
            (batch.drafter, "draft", "drafting"),
            (batch.chooser, "verify", "acceptance"),
            (batch.cache, "commit", "commit"),
            (batch.drafter, "observe", "commit"),
            (batch, "commit", "commit"),
        ):
            if owner is not None:
                setattr(owner, name, counting.of(part, getattr(owner, name)))
        # On a GPU a captured round has a rounded-up plan.
        plan = round_up(RoundPlan(depth, CONTEXT + depth + 1, depth + 1, None), size.capacity)
        with counting.active():
            run_round(batch, plan)
    return counting


@contextmanager
def published_rule(trunk: Trunk, counting: Counting) -> Iterator[None]:
    """Count the chunked rule of Gated DeltaNet by its published cost inside this context."""
    recurrent = trunk.family.trunk.recurrent
    if recurrent is None or recurrent.rule != "gated_delta":
        yield
        return

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_unused: Any) -> Any:
        output = torch.empty_like(value)
        nbytes = sum(map(stored, (query, key, value, g, beta, output)))
        counting.note("trunk: delta_rule (published)", RULE_KERNELS, nbytes, 8 * value.numel() * key.shape[-1])
        return output, None

    with replacing(importlib.import_module(trunk.family.classes.python_module), **{recurrent.chunked: rule}):
        yield


def count_step(model: SpeculativeDecoder, tokens: int, eager: bool = False) -> Counting:
    """Count a step of head training: trunk, head, loss, backward and AdamW. Every document has ``SEQ_LEN`` tokens."""
    trunk, head = model.trunk, model.drafting.head.float().requires_grad_(True)
    counting = Counting(trunk.causal_lm.get_output_embeddings(), eager)
    groups = [[Segment(row, 0, SEQ_LEN) for row in range(tokens // SEQ_LEN)]]
    micro = MicroBatch(
        documents(tokens, SEQ_LEN, len(trunk.lm_head_VD), META),
        torch.ones(DEPTH, device=META),
        groups,
        used_N=torch.arange(tokens, device=META),
    )
    module = HeadTraining(
        TrunkStates(trunk), head, num_depths=DEPTH, kind="kl", temperature=1.0, compute_dtype=DTYPE
    ).train()
    in_parts = (
        (states, "isolated_hidden", "trunk"),
        (head, "unroll", "head"),
        (head_training, "frozen_head_loss", "loss"),
    )
    with ExitStack() as stack:
        for owner, name, part in in_parts:
            stack.enter_context(replacing(owner, **{name: counting.of(part, getattr(owner, name))}))
        stack.enter_context(replacing(torch, autocast=OnGpu))
        # The head's experts; the trunk's are in this dtype.
        stack.enter_context(replacing(experts, autocast_dtype=lambda _device: DTYPE))
        stack.enter_context(published_rule(trunk, counting))
        stack.enter_context(OnGpu("meta"))
        stack.enter_context(counting.compiling())
        replace_forwards(compilable(row_norms(module.modules()), META))
        stack.enter_context(counting.active())
        total = module(micro).total
        counting.of("head: backward", total.backward)()
        counting.of("optimizer", adamw)([one for one in module.parameters() if one.grad is not None])
    return counting


def adamw(trained: Sequence[Tensor]) -> None:
    """Take a step of AdamW in its fused kernel, which torch's class refuses on the meta device."""
    weights, gradients = [one.detach() for one in trained], [one.grad for one in trained]
    rates = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "eps": 1e-8}
    # The moments have the shapes of the weights.
    torch._fused_adamw_(weights, gradients, weights, weights, [], [], **rates, amsgrad=False, maximize=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Count, and print everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(DEMO), help="config.json of a model with a head; default: the demo's")
    parser.add_argument("--train-tokens", type=int, default=8192, help="a multiple of 2048; default: 8192")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args(argv)
    model = random_model(options.config, META, DTYPE)
    # The step comes last: it leaves the head in fp32.
    found = {
        "plain_round": count_round(model, 0, options.eager).row(),
        "round_3_drafts": count_round(model, DEPTH, options.eager).row(),
        "step": count_step(model, options.train_tokens, options.eager).row(),
    }
    settings = {**vars(options), "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"settings": settings, **found}))


if __name__ == "__main__":
    main()
