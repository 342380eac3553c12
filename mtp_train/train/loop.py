"""The training loop of the head, to be read from top to bottom.

The host plans each micro-batch (:func:`micro_batches`): the first one of a step while the device still computes the
step before, and each of the others while it computes the one before it. Where the device copies from page-locked
memory, the host waits for it once in a step, for the losses. A step's batches depend on the number of the step alone,
so a resumed run gets those of an unbroken one.

Shapes: B rows, T tokens, K depths, N = B * T target rows.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from mtp_train.data.pack import PackedSequence, collate, count_targets
from mtp_train.errors import TrainingError
from mtp_train.heads.head import Head
from mtp_train.losses.chunked import depth_weights
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.launch import clip_gradient, prepare, run_facts, takes_fused
from mtp_train.train.log import STEP_PARTS, RunLog
from mtp_train.train.packed_rows import valid_rows
from mtp_train.train.plan import Plan, TrainOptions
from mtp_train.train.select import Selection, score_of
from mtp_train.train.state import (
    best_weights,
    head_state,
    load_best,
    load_moments,
    load_sums,
    load_weights,
    newest_whole_step,
    save_state,
)
from mtp_train.train.step_timer import StepTimer
from mtp_train.train.stopping import noted_signal, stopped_after
from mtp_train.trunk.states import States
from mtp_train.upstream.compiled import compilable, compiles_on, num_graphs, replace_forwards, row_norms

_LOG = logging.getLogger(__name__)
_PINNING = ("cuda", "xpu")
"""Types of devices that copy from page-locked memory while they compute."""

BatchFn = Callable[[int], Sequence[PackedSequence]]
"""From a step (0-based) to its packed sequences, the same on every rank."""
StepBatches = tuple[Sequence[PackedSequence], Iterator[MicroBatch]]
"""A step's sequences over all processes, and this process's micro-batches of them, of which the first is made."""


@dataclass
class LogSums:
    loss_sum_K: list[float]
    targets_K: list[float]
    tokens: int = 0
    seconds_before: float = 0.0
    """Seconds before this process resumed the run."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    """Seconds of each part of a step but waiting, which is the rest."""
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def zero(cls, num_depths: int) -> LogSums:
        return cls([0.0] * num_depths, [0.0] * num_depths)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def saved(self) -> dict[str, Any]:
        """Return the constructor arguments of the sums, for a resume state."""
        return {
            "loss_sum_K": self.loss_sum_K,
            "targets_K": self.targets_K,
            "tokens": self.tokens,
            "seconds_before": self.seconds,
            "parts": self.parts,
        }


@dataclass
class Training:
    """The objects that a training step uses."""

    options: TrainOptions
    plan: Plan
    weight_K: Sequence[float]
    """The weight of each depth, which sum to 1."""
    batch_fn: BatchFn
    accelerator: Accelerator
    module: HeadTraining
    wrapped: nn.Module
    optimizer: Any
    selection: Selection | None
    state_dir: Path
    log: RunLog | None
    facts: dict[str, Any]
    """What every log line repeats: processes, wrapper, precision and device."""
    sums: LogSums
    timer: StepTimer

    def documents_from(self, done: int) -> Iterator[int]:
        """Yield the documents that this process reads after ``done`` steps, in order."""
        for step in range(done, self.options.max_steps):
            sequences = self.batch_fn(step)
            for micro in range(self.plan.accumulation):
                for row in sequences[self.plan.share(micro, self.accelerator.process_index)]:
                    yield from row.members

    def batches(self, step: int) -> StepBatches:
        sequences = self.batch_fn(step)
        made = micro_batches(sequences, self.plan, self.weight_K, self.accelerator, self.module.states)
        return sequences, chain([next(made)], made)


def micro_batches(
    sequences: Sequence[PackedSequence],
    plan: Plan,
    weight_K: Sequence[float],
    accelerator: Accelerator,
    states: States,
) -> Iterator[MicroBatch]:
    """Yield this process's micro-batches of a step, given the step's sequences over all processes.

    Losses are divided by the number of targets of the whole step, over all processes and micro-batches, so the gradient
    is the same for every world size and accumulation. The factors undo the wrapper's averaging over processes and
    accelerate's averaging over micro-batches.
    """
    num_depths = len(weight_K)
    rank = accelerator.process_index
    totals = [sum(column) for column in zip(*(count_targets(one, num_depths) for one in sequences), strict=True)]
    rounds = plan.world_size * plan.accumulation
    scale_K = torch.tensor([rounds * weight / max(1, total) for weight, total in zip(weight_K, totals, strict=True)])
    for micro in range(plan.accumulation):
        shares = [sequences[plan.share(micro, one)] for one in range(plan.world_size)]
        batch = collate(list(shares[rank]))
        starts = [one.starts_P for one in shares[rank] if one.starts_P is not None]
        starts_BP = torch.from_numpy(np.stack(starts)) if starts else None
        used_N = valid_rows(batch, num_depths, starts_BP).any(dim=0).nonzero().squeeze(1)
        made = MicroBatch(batch, scale_K, states.prepare(shares, rank), used_N, starts_BP)
        yield made.mapped(Tensor.pin_memory) if accelerator.device.type in _PINNING else made


def make_optimizer(head: nn.Module, options: TrainOptions, *, fused: bool = False) -> torch.optim.AdamW:
    """Build AdamW over the head; weight decay on matrices only.

    Args:
        fused: Whether a step is one CUDA kernel for many tensors; on CPUs it would round in another way.
    """
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # LoRA trains no vectors. Leave the empty group out, which DeepSpeed does not expect.
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused or None)


def train_head(
    module: HeadTraining,
    *,
    options: TrainOptions,
    plan: Plan,
    batch_fn: BatchFn,
    accelerator: Accelerator,
    state_dir: Path,
    make_log: Callable[[int], RunLog | None],
    on_step: Callable[[int], None],
    selection: Selection | None = None,
) -> dict[str, Tensor]:
    """Train the head from the newest saved state to the last step.

    Args:
        accelerator: Built with ``gradient_accumulation_steps=plan.accumulation``.
        make_log: From the step to resume at to the open log; None on ranks that do not log.
        on_step: Called after each step with the number of steps done, for a progress bar.

    Returns:
        The trained weights, whole on every rank; with LoRA, its matrices. ``module`` may be left in shards.

    Raises:
        TrainingError: The loss or the gradient is not finite, or the ranks are not joined.
        StoppedError: A process received SIGTERM or SIGINT; the state is saved.
    """
    head = module.head
    done = resume(state_dir, head, selection, accelerator)
    if is_over(done, options, selection):
        return chosen_weights(head, state_dir, selection)
    optimizer = make_optimizer(head, options, fused=takes_fused(accelerator))
    wrapped, optimizer = prepare(module, optimizer, accelerator, plan, options.max_grad_norm)
    replace_forwards(compilable(row_norms(module.modules()), accelerator.device))
    if done:
        load_moments(state_dir, done, head, optimizer)
    run = Training(
        options=options,
        plan=plan,
        weight_K=depth_weights(module.num_depths, options.depth_decay),
        batch_fn=batch_fn,
        accelerator=accelerator,
        module=module,
        wrapped=wrapped,
        optimizer=optimizer,
        selection=selection,
        state_dir=state_dir,
        log=make_log(done),
        facts=run_facts(accelerator, wrapped, module.compute_dtype),
        sums=LogSums(**load_sums(state_dir, done)) if done else LogSums.zero(module.num_depths),
        timer=StepTimer(accelerator.device),
    )
    if selection is not None and not done:
        measure_start(run, selection)
    take_steps(run, done, on_step)
    return chosen_weights(head, state_dir, selection)


def measure_start(run: Training, selection: Selection) -> None:
    """Measure the head before the first step, and set the learning rate if it depends on that."""
    figures = measure(run, selection, 0)
    if selection.lr_for is not None:
        run.options = replace(run.options, lr=selection.lr_for(figures["held_out_overlap_depth_1"]))
    # The clock of the log begins with the first step.
    run.sums = LogSums.zero(len(run.weight_K))
    save(run, 0)


def resume(state_dir: Path, head: Head, selection: Selection | None, accelerator: Accelerator) -> int:
    """Load the newest whole state's weights and best head; return its step, 0 if there is none.

    Broken states are removed, and named in a warning.
    """
    done, broken = newest_whole_step(state_dir)
    # As the main process finds it, which also waits until all processes have looked: states are removed below.
    done = broadcast_object_list([done])[0]
    accelerator.wait_for_everyone()
    if broken and accelerator.is_main_process:
        for path in broken:
            shutil.rmtree(path)
        _LOG.warning("%s; resuming from the state of step %d", "; ".join(broken.values()), done)
    if done:
        load_weights(state_dir, done, head)
        if selection is not None:
            selection.best = load_best(state_dir, done)
    return done


def take_steps(run: Training, done: int, on_step: Callable[[int], None]) -> None:
    """Take the steps after the first ``done``; after a signal, raise a StoppedError once the state is saved."""
    on_step(done)
    run.wrapped.train()
    run.module.states.expect(run.documents_from(done))
    told_to_stop = False
    following: StepBatches | None = None
    with noted_signal() as signals:
        while not (told_to_stop or is_over(done, run.options, run.selection)):
            run.timer.mark("waiting")
            sequences, given = following or run.batches(done)
            for group in run.optimizer.param_groups:
                group["lr"] = run.options.lr_at(done)
            sums_2K, norm_1 = optimise(
                run.wrapped, run.optimizer, run.accelerator, run.options.max_grad_norm, given, run.timer.mark
            )
            # While the device still computes this step.
            following = run.batches(done + 1) if done + 1 < run.options.max_steps else None
            run.timer.mark("fetch")
            norm, told_to_stop = gather(run, sums_2K, norm_1, sequences, signals.number is not None)
            done += 1
            finish_step(run, done, norm, saves=told_to_stop)
            on_step(done)
    run.accelerator.wait_for_everyone()
    if run.log is not None:
        run.log.close()
    if not is_over(done, run.options, run.selection):
        raise stopped_after(run.state_dir.parent, done, run.options.max_steps, signals)


def is_over(done: int, options: TrainOptions, selection: Selection | None) -> bool:
    return done >= options.max_steps or (selection is not None and selection.is_exhausted)


def chosen_weights(head: Head, state_dir: Path, selection: Selection | None) -> dict[str, Tensor]:
    return head_state(head) if selection is None else best_weights(state_dir)


def optimise(
    wrapped: nn.Module,
    optimizer: Any,
    accelerator: Accelerator,
    max_grad_norm: float,
    given: Iterable[MicroBatch],
    mark: Callable[[str], None] = lambda part: None,
) -> tuple[Tensor, Tensor]:
    """Do one optimiser step over this rank's micro-batches, copied to the device here, without waiting for it.

    Args:
        mark: Called at the end of each part of the step, with its name.

    Returns:
        Each depth's loss sum and number of targets on this rank, shape (2, K), and the gradient norm, (1,).
    """
    sums_2K = torch.zeros(2, 1, device=accelerator.device)
    norm_1 = torch.zeros(1, device=accelerator.device)
    for micro in given:
        mark("fetch")
        with accelerator.accumulate(wrapped):
            terms = wrapped(micro=micro.to(accelerator.device))
            mark("forward")
            accelerator.backward(terms.total)
            mark("backward")
            sums_2K = sums_2K + torch.stack([terms.sum_K, terms.count_K])
            if accelerator.sync_gradients:
                norm_1 += clip_gradient(accelerator, wrapped, max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        mark("optimiser")
    return sums_2K, norm_1


def gather(
    run: Training, sums_2K: Tensor, norm_1: Tensor, sequences: Sequence[PackedSequence], told_to_stop: bool
) -> tuple[float, bool]:
    """Add one step's sums over all ranks to the log's; return its gradient norm, and whether any rank shall stop.

    The host waits for the device here, once in a step.
    """
    told_1 = sums_2K.new_full((1,), float(told_to_stop))
    reduced = run.accelerator.reduce(torch.cat([sums_2K.flatten(), told_1]), reduction="sum")
    *sums, told, norm = torch.cat([reduced, norm_1]).tolist()
    run.timer.read(run.sums.parts)
    num_depths = sums_2K.shape[1]
    for row, into in enumerate((run.sums.loss_sum_K, run.sums.targets_K)):
        for depth in range(num_depths):
            into[depth] += sums[row * num_depths + depth]
    for sequence in sequences:
        run.sums.tokens += int((sequence.document_T >= 0).sum())
    return norm, told > 0


def finish_step(run: Training, done: int, norm: float, *, saves: bool) -> None:
    """Check, log, measure and save after ``done`` steps, as far as each is due."""
    options, selection, weight_K = run.options, run.selection, run.weight_K
    require_finite(run, done, norm)
    if done % options.log_steps == 0 or done == options.max_steps:
        if run.log is not None:
            compiled = {"compiled_graphs": num_graphs()} if compiles_on(run.accelerator.device) else {}
            run.log.log(done, log_line(run.sums, weight_K, norm, options.lr_at(done - 1)) | run.facts | compiled)
        run.sums = LogSums.zero(len(weight_K))
    if selection is not None and (done % selection.every_steps == 0 or done == options.max_steps):
        measure(run, selection, done)
        saves = True
    if saves or done % options.save_steps == 0 or done == options.max_steps:
        save(run, done)


def save(run: Training, done: int) -> None:
    """Save the state after ``done`` steps; every process must call it."""
    save_state(
        run.state_dir,
        done,
        run.module.head,
        run.optimizer,
        None if run.selection is None else run.selection.best,
        run.sums.saved(),
        writes=run.accelerator.is_main_process,
    )


def measure(run: Training, selection: Selection, done: int) -> dict[str, Any]:
    """Measure, judge and log the head after ``done`` steps, and return the figures; every process must call it."""
    figures = selection.measure(run.wrapped, run.module, run.accelerator)
    selection.judge(done, score_of(figures))
    if run.log is not None:
        run.log.log(done, figures)
    return figures


def require_finite(run: Training, done: int, norm: float) -> None:
    """Raise a TrainingError if the step's loss or gradient is not finite."""
    if not all(map(math.isfinite, (norm, *run.sums.loss_sum_K))):
        raise TrainingError(
            f"step {done}: loss {run.sums.loss_sum_K}, gradient norm {norm}; expected finite numbers. Lower train.lr; "
            "the last saved state is untouched."
        )


def log_line(sums: LogSums, weight_K: Sequence[float], norm: float, lr: float) -> dict[str, Any]:
    """Return the numbers of one log line: the loss that is minimised, and each depth's mean over its targets."""
    loss_K = [total / count if count else None for total, count in zip(sums.loss_sum_K, sums.targets_K, strict=True)]
    seconds = sums.seconds
    return {
        "loss": sum(weight * (loss or 0.0) for weight, loss in zip(weight_K, loss_K, strict=True)),
        **{f"loss_depth_{depth + 1}": loss for depth, loss in enumerate(loss_K)},
        "lr": lr,
        "grad_norm": norm,
        "tokens": sums.tokens,
        "seconds": round(seconds, 3),
        **{f"seconds_{part}": round(value, 3) for part, value in sums.parts.items()},
        "seconds_waiting": round(seconds - sum(sums.parts.values()), 3),
        "tokens_per_second": round(sums.tokens / seconds, 1),
    }
