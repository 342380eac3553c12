#!/usr/bin/env python
"""Measure a step of head training, compared with its matrix products alone and with the trunk's forward pass.

    python inference/benchmarks/training.py --model demo:base --tokens 2048 --seq-len 512
    python inference/benchmarks/training.py --shape 9b --device cuda --tokens 8192 --seq-len 2048 [--rows triton]

``--precision`` is the dtype of matrix products, like ``train.precision`` of a recipe. ``--trunk-dtype`` is the dtype of
the trunk's weights. The head's weights are fp32, as in training.

``step`` is a whole step: trunk, head, loss, backward and optimiser. ``step, states kept`` is a step with stored hidden
states of the trunk (``train.hidden_cache``). The floor of either, ``products``, is the time of its own matrix products
alone: each ``mm``, ``addmm`` and ``bmm`` of its forward and backward pass is recorded with its shapes, strides and
dtypes, and computed again on random numbers (``mtp_inference/bench/products.py``). Fused attention is not part of the
floor. The parts take turns. Times are medians; a step over its floor is the median of the repeats, with the range.

On a CPU times are the CPU time of all threads of the process: set ``OMP_NUM_THREADS=1`` for the time of one thread.

``--attention flex`` unrolls the head like ``train.attention: flex``, on a GPU; its compilation is not timed.

The memory of the loss is the peak of its tensors, without the hidden states (input) and their gradient (output). It is
given for the chunked loss, and for the same loss with all logits at once, which is counted without computing it.

For one chunk, the matrix products of the loss are also timed separately from the work on their rows (``--rows``, like
``objective.rows`` of a recipe). The floor of that work is to read p's and q's logits once and to write the gradient
once per depth, at the rate of copying such logits. ``--chunk-rows`` sets the rows of a chunk; by default the device and
its memory do, as in training.

``loop`` is a step of the training loop itself on packed documents, with its logging: fed ahead
(``mtp_train/train/feed.py``), and in turn, with batches that are collated when they are needed, copied while the host
waits, and looked at on the device. On a CPU nothing is prepared ahead.

Shapes: B rows, T tokens, K depths, N = B * T target rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, cast, get_args

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from mtp_inference.bench.clock import take_turns
from mtp_inference.bench.machine import cpu_name
from mtp_inference.bench.measurements import paired_ratios
from mtp_inference.bench.memory import PeakMemory
from mtp_inference.bench.products import Product, Replay, recorded
from mtp_inference.bench.subject import SHAPES, Subject, checkpoint_subject, shape_subject
from mtp_train.data.pack import PackedSequence, global_batches
from mtp_train.data.tokenize import Document
from mtp_train.heads.flex import Attention, require_flex_device
from mtp_train.losses.chunked import RowsIn, chunk_rows, frozen_head_loss, gpu_bytes_of, logit_bytes, row_work
from mtp_train.recipe.loading import recipe_from_mapping
from mtp_train.recipe.schema import Recipe
from mtp_train.train.aligned import AlignedRows, Batch, aligned_rows
from mtp_train.train.estimate import active_weights
from mtp_train.train.feed import Feed, Preparation
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.launch import clip_gradient
from mtp_train.train.loop import optimise
from mtp_train.train.plan import make_plan
from mtp_train.trunk.isolate import isolated_hidden
from mtp_train.weights.demo import resolve

GIB = 1 << 30
LOOP_STEPS = 3
"""Steps of the training loop that are timed together."""
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Bench(NamedTuple):
    """The parts of a training step to time."""

    module: HeadTraining
    optimizer: torch.optim.Optimizer
    batch: Batch
    scale_K: Tensor
    hidden_BTD: Tensor

    def trunk(self) -> None:
        """Run the trunk."""
        with self.module.computing():
            isolated_hidden(self.module.trunk, self.batch.tokens_BT, self.batch.document_BT)

    def head(self) -> AlignedRows:
        """Unroll the head, forward only, and keep the activations for a backward pass."""
        module = self.module
        with module.computing():
            return aligned_rows(
                module.trunk,
                module.head,
                self.batch,
                self.depths,
                hidden_BTD=self.hidden_BTD,
                attention=module.attention,
            )

    def forward(self) -> Tensor:
        """Run head and loss; the loss computes its gradient in the forward pass."""
        total: Tensor = self.module(*self.batch, self.scale_K, self.hidden_BTD).total
        return total

    def kept_step(self) -> None:
        """Run a step with stored hidden states of the trunk."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Run a whole step."""
        self.module(*self.batch, self.scale_K).total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def depths(self) -> int:
        """K."""
        return self.module.num_depths

    @property
    def loss_rows(self) -> int:
        """Target rows of one chunk of the loss."""
        module, matrix_VD = self.module, self.module.trunk.lm_head_VD
        bytes_each = logit_bytes(module.rows_in, module.kind, module.compute_dtype)
        return module.loss_rows or chunk_rows(len(matrix_VD), bytes_each, gpu_bytes_of(matrix_VD.device))

    @property
    def output_VD(self) -> Tensor:
        """The output matrix, in the dtype of the loss's matrix products."""
        return self.module.trunk.lm_head_VD.to(self.module.compute_dtype)


def make_bench(
    subject: Subject,
    num_tokens: int,
    seq_len: int,
    num_depths: int,
    *,
    compute_dtype: torch.dtype,
    rows_in: RowsIn = "torch",
    loss_rows: int | None = None,
    attention: Attention = "dense",
) -> Bench:
    """Build module, optimiser and a batch of random tokens, with one document per full row.

    Args:
        subject: Trunk and head.
        num_tokens: Tokens per step.
        seq_len: T.
        num_depths: K.
        compute_dtype: See :class:`HeadTraining`.
        rows_in: See :class:`HeadTraining`.
        loss_rows: See :class:`HeadTraining`.
        attention: See :class:`HeadTraining`.
    """
    trunk, head = subject.trunk, subject.head
    if head is None:
        raise SystemExit("no head: expected a checkpoint with one")
    device, vocab = trunk.lm_head_VD.device, trunk.lm_head_VD.shape[0]
    shape = (num_tokens // seq_len, seq_len)
    tokens_BT = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0)).to(device)
    batch = Batch(
        tokens_BT,
        torch.arange(seq_len, device=device).expand(shape),
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.ones(shape, dtype=torch.bool, device=device),
    )
    module = HeadTraining(
        trunk,
        head.float().requires_grad_(True),
        num_depths=num_depths,
        kind="kl",
        temperature=1.0,
        rows_in=rows_in,
        loss_rows=loss_rows,
        attention=attention,
        compute_dtype=compute_dtype,
    )
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    with module.computing():
        hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
    scale_K = torch.full((num_depths,), 1 / num_tokens, device=device)
    return Bench(module.train(), optimizer, batch, scale_K, hidden_BTD)


class Recorded(NamedTuple):
    """The matrix products of both kinds of step."""

    step: list[Product]
    kept_step: list[Product]


def record_steps(bench: Bench) -> Recorded:
    """Record both kinds of step, after a first step, which makes the optimiser's state."""
    bench.step()
    return Recorded(recorded(bench.step), recorded(bench.kept_step))


def time_parts(bench: Bench, products: Recorded, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each part of a step in each repeat."""
    parts: dict[str, Callable[[], object]] = {
        "trunk alone": bench.trunk,
        "step": bench.step,
        "products": Replay(products.step),
        "step, states kept": bench.kept_step,
        "products, states kept": Replay(products.kept_step),
        "head and loss, forward": bench.forward,
        "head, forward": bench.head,
    }
    return take_turns(parts, repeats, bench.batch.tokens_BT.device)


def medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median seconds of each part."""
    return {name: median(seconds) for name, seconds in taken.items()}


def time_loss(bench: Bench, repeats: int) -> dict[str, float]:
    """Return the median seconds of the parts of the loss on one chunk of rows, for all depths."""
    module, device = bench.module, bench.batch.tokens_BT.device
    lm_head_VD, targets_N = bench.output_VD, bench.batch.tokens_BT.flatten()
    state_ND = bench.hidden_BTD.flatten(0, 1).to(lm_head_VD.dtype)
    # Use different logits for q and p.
    state_CD, targets_C = state_ND[: bench.loss_rows], targets_N[: bench.loss_rows]
    teacher_CV, student_CV = state_CD @ lm_head_VD.T, state_CD.flip(0) @ lm_head_VD.T

    def multiply() -> None:
        for depth in range(1 + bench.depths):
            logits_CV = state_CD @ lm_head_VD.T
            if depth:
                _ = logits_CV @ lm_head_VD

    def work_on_rows() -> None:
        work = row_work(module.rows_in, module.kind, teacher_CV, module.temperature)
        for _ in range(bench.depths):
            # Kernels write the gradient over q's logits. Repeats on it take as long as on logits.
            work(student_CV, targets_C).gradient_CV.to(lm_head_VD.dtype)

    parts: dict[str, Callable[[], object]] = {"products": multiply, "rows": work_on_rows, "copy": student_CV.clone}
    with torch.no_grad():
        return medians(take_turns(parts, repeats, device))


@dataclass(frozen=True)
class HeldStates:
    """Hidden states in main memory in place of a cache on disk, the same for every sequence."""

    states_BTD: Tensor

    def rows(self, sequences: Sequence[PackedSequence], *, pins: bool = False) -> Tensor:
        """Return a copy, like ``HiddenCache.rows``."""
        held_BTD = self.states_BTD[: len(sequences)]
        return torch.empty(held_BTD.shape, dtype=held_BTD.dtype, pin_memory=pins).copy_(held_BTD)


class Loop:
    """The training loop on packed documents of random tokens, four to a sequence.

    Args:
        bench: Module, optimiser and shapes.
        states: Hidden states of the trunk; None computes them in every step.
    """

    def __init__(self, bench: Bench, states: HeldStates | None) -> None:
        self.bench, self.states = bench, states
        num_rows, seq_len = bench.batch.tokens_BT.shape
        self.recipe = _recipe(bench.depths, num_rows, seq_len)
        self.plan = make_plan(self.recipe, 1)
        self.accelerator = Accelerator(cpu=bench.batch.tokens_BT.device.type == "cpu", mixed_precision="no")
        self.optimizer = self.accelerator.prepare(bench.optimizer)
        held = cast("HiddenCache | None", states)
        self.preparation = Preparation.of(self.recipe, self.plan, self.accelerator, held)
        vocab, generator = len(bench.module.trunk.lm_head_VD), torch.Generator().manual_seed(0)
        texts = torch.randint(vocab, (4 * num_rows, max(1, seq_len // 4)), generator=generator).tolist()
        documents = [Document(tuple(text), (True,) * len(text), "d", "g") for text in texts]
        self.batch_fn = global_batches(
            documents, seq_len_tokens=seq_len, pack=True, sequences_per_step=num_rows, seed=0
        )

    def ahead(self) -> None:
        """Run steps that are fed ahead."""
        with Feed(self.preparation.steps(self.batch_fn, 0), self.accelerator.device) as feed:
            for _ in range(LOOP_STEPS):
                given = feed.micro_batches(1)
                sums_2K, norm_1 = optimise(self.bench.module, self.optimizer, self.accelerator, self.recipe, given)
                torch.cat([sums_2K.flatten(), norm_1]).tolist()

    def in_turn(self) -> None:
        """Run steps whose batches are collated and copied when they are needed, and looked at on the device."""
        module, device = self.bench.module, self.accelerator.device
        for prepared in replace(self.preparation, pins=False).steps(self.batch_fn, 0):
            given = prepared.micro_batch.mapped(lambda tensor: tensor.to(device))
            terms = module(*given.batch, given.scale_K, given.hidden_BTD)
            terms.total.backward()
            float(clip_gradient(self.accelerator, module, self.recipe.train.max_grad_norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            torch.stack([terms.sum_K, terms.count_K]).tolist()


def _recipe(num_depths: int, num_rows: int, seq_len: int) -> Recipe:
    sizes = {"max_steps": LOOP_STEPS, "warmup_steps": 0, "tokens_per_step": num_rows * seq_len, "lr": 1e-6}
    return recipe_from_mapping(
        {
            "run_dir": "run",
            "model": {"trunk": "finetune", "head_from": "base"},
            "head": {"num_depths": num_depths},
            "data": {"sources": [{"path": "chats.jsonl"}], "seq_len_tokens": seq_len},
            "train": {**sizes, "micro_batch_sequences": num_rows},
            "evaluate": {"arms": ["none", "graft", "retrained"]},
        }
    )


def time_loop(bench: Bench, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step of the training loop, fed ahead and in turn."""
    whole, kept = Loop(bench, None), Loop(bench, HeldStates(bench.hidden_BTD.cpu()))
    parts: dict[str, Callable[[], object]] = {
        "ahead": whole.ahead,
        "in turn": whole.in_turn,
        "ahead, states kept": kept.ahead,
        "in turn, states kept": kept.in_turn,
    }
    taken = take_turns(parts, repeats, bench.batch.tokens_BT.device)
    return {name: seconds / LOOP_STEPS for name, seconds in medians(taken).items()}


def counted_flops(bench: Bench) -> dict[str, int]:
    """Return the multiplications and additions with weights in each part, counted from sizes, for all tokens."""
    trunk, head = bench.module.trunk, bench.module.head
    experts = trunk.config.to_dict().get("num_experts_per_tok") or 1
    tokens, lm_head = bench.batch.tokens_BT.numel(), trunk.lm_head_VD.numel()
    in_trunk = active_weights({name: value.shape for name, value in trunk.decoder.named_parameters()}, experts)
    in_head = active_weights({name: value.shape for name, value in head.blocks[0].named_parameters()}, experts)
    return {
        "trunk": 2 * in_trunk * tokens,
        "head": 6 * in_head * tokens * bench.depths,
        "loss": 2 * lm_head * tokens * (1 + 2 * bench.depths),
    }


def loss_memory(bench: Bench) -> dict[str, int]:
    """Return the peak bytes of the chunked loss, and of the loss with all logits at once."""
    module = bench.module
    with torch.no_grad():
        rows = bench.head()
    student_KND = rows.student_KND.detach().requires_grad_(True)
    weight_KN = rows.valid_KN.float()
    given = [student_KND, rows.teacher_ND, module.trunk.lm_head_VD, rows.targets_N, weight_KN]
    with PeakMemory(given) as ours:
        terms = frozen_head_loss(
            *given,
            kind="kl",
            rows_in=module.rows_in,
            compute_dtype=module.compute_dtype,
            num_rows=module.loss_rows,
        )
        terms.total.backward()
    shadows = [torch.empty_like(one, device="meta") for one in given]
    shadows[0].requires_grad_(True)
    with PeakMemory(shadows) as whole:
        all_logits_kl(*shadows[:3], shadows[4]).backward()
    # Both peaks include the gradient of the hidden states, which is subtracted.
    return {"chunked": ours.peak_bytes - student_KND.nbytes, "all_logits": whole.peak_bytes - student_KND.nbytes}


def all_logits_kl(student_KND: Tensor, teacher_ND: Tensor, lm_head_VD: Tensor, weight_KN: Tensor) -> Tensor:
    """Return the KL loss with all logits at once, in fp32."""
    matrix_DV = lm_head_VD.T
    log_p_NV = log_softmax((teacher_ND.to(lm_head_VD.dtype) @ matrix_DV).float(), -1)
    log_q_KNV = log_softmax((student_KND.to(lm_head_VD.dtype) @ matrix_DV).float(), -1)
    loss_KN = kl_div(log_q_KNV, log_p_NV.expand_as(log_q_KNV), reduction="none", log_target=True).sum(-1)
    return (loss_KN * weight_KN).sum()


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Return all measurements, in seconds, operations and bytes."""
    device, tokens = bench.batch.tokens_BT.device, bench.batch.tokens_BT.numel()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    products, work = record_steps(bench), counted_flops(bench)
    step_peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    taken = time_parts(bench, products, repeats)
    seconds = medians(taken)
    over_trunk = {name: value / seconds["trunk alone"] for name, value in seconds.items()}
    of_loss = time_loss(bench, repeats)
    return {
        "seconds": seconds,
        "tokens_per_second": {name: tokens / seconds[name] for name in ("trunk alone", "step", "step, states kept")},
        "over_trunk": over_trunk,
        "flops": work,
        "flops_over_trunk": sum(work.values()) / work["trunk"],
        "floor_flops": sum(one.flops for one in products.step),
        "step_over_floor": paired_ratios(taken["step"], taken["products"])._asdict(),
        "kept_step_over_floor": paired_ratios(taken["step, states kept"], taken["products, states kept"])._asdict(),
        "loss_bytes": loss_memory(bench),
        "loss_seconds": of_loss,
        "rows_over_products": of_loss["rows"] / of_loss["products"],
        # A copy reads one tensor and writes one; each depth reads two and writes one.
        "rows_over_floor": of_loss["rows"] / (1.5 * bench.depths * of_loss["copy"]),
        "step_peak_bytes": step_peak,
        "loss_rows": bench.loss_rows,
        "loop_seconds": time_loop(bench, repeats),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default="demo:base", help="a checkpoint with a head")
    what.add_argument("--shape", choices=list(SHAPES), help="random weights instead")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--depths", type=int, default=3)
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: fp32 on a CPU, else bf16")
    parser.add_argument("--trunk-dtype", choices=tuple(DTYPES), default="auto", help="auto: fp32 on a CPU, else stored")
    parser.add_argument("--chunk-rows", type=int, help="target rows of one chunk of the loss; default: the device's")
    parser.add_argument("--rows", choices=get_args(RowsIn), default="torch", help="what makes losses of logits")
    parser.add_argument("--attention", choices=("dense", "flex"), default="dense")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.tokens < options.seq_len or options.tokens % options.seq_len:
        parser.error(f"--tokens: found {options.tokens}; expected a multiple of --seq-len, {options.seq_len}")
    if options.chunk_rows is not None and options.chunk_rows < 1:
        parser.error(f"--chunk-rows: found {options.chunk_rows}; expected 1 or more. Leave it out.")
    if options.precision is None:
        options.precision = "fp32" if options.device.type == "cpu" else "bf16"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and last one line of JSON."""
    options = _parse(arguments)
    device = options.device
    require_flex_device(options.attention, device)
    dtype = DTYPES[options.trunk_dtype]
    if options.shape:
        subject = shape_subject(options.shape, dtype=dtype, device=device, seed=0)
    else:
        subject = checkpoint_subject(
            resolve(options.model), None, adapter=None, dtype=dtype, device=device, drafts=True
        )
    bench = make_bench(
        subject,
        options.tokens,
        options.seq_len,
        options.depths,
        compute_dtype=torch.bfloat16 if options.precision == "bf16" else torch.float32,
        rows_in=options.rows,
        loss_rows=options.chunk_rows,
        attention=options.attention,
    )
    found = measure(bench, options.repeats)
    for name, seconds in found["seconds"].items():
        print(f"{name:<24}{1000 * seconds:>12.1f} ms{found['over_trunk'][name]:>8.2f} x trunk")
    for name, key in (("a step", "step_over_floor"), ("a step, states kept,", "kept_step_over_floor")):
        ratio = found[key]
        print(f"{name} takes {ratio['median']:.2f} x its floor ({ratio['least']:.2f} to {ratio['most']:.2f})")
    print(", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in found["tokens_per_second"].items()))
    memory = found["loss_bytes"]
    print(f"loss: {memory['chunked'] / GIB:.3f} GiB by chunks, {memory['all_logits'] / GIB:.3f} GiB with all logits")
    of_loss = found["loss_seconds"]
    print(
        f"a chunk of the loss: products {1000 * of_loss['products']:.1f} ms, rows {1000 * of_loss['rows']:.1f} ms, "
        f"{found['rows_over_products']:.2f} x the products and {found['rows_over_floor']:.2f} x their floor"
    )
    for name, seconds in found["loop_seconds"].items():
        print(f"loop, {name:<20}{1000 * seconds:>12.1f} ms a step")
    settings = {name: str(value) for name, value in vars(options).items()} | {
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(subject.trunk.lm_head_VD.dtype),
    }
    print(json.dumps({"benchmark": "training", "settings": settings, "results": found}))


if __name__ == "__main__":
    main()
