"""The training loop of the head, to be read from top to bottom."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from torch import Tensor, nn

from mtp_train.data.pack import PackedSequence, collate
from mtp_train.errors import TrainingError
from mtp_train.heads.module import MtpHead
from mtp_train.losses.chunked import depth_weights
from mtp_train.recipe.schema import Recipe
from mtp_train.train.feed import BatchFn, Feed, MicroBatch, Preparation
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.launch import clip_gradient, prepare, run_facts
from mtp_train.train.log import RunLog
from mtp_train.train.plan import Plan, learning_rate
from mtp_train.train.select import Selection
from mtp_train.train.state import (
    head_state,
    load_best,
    load_moments,
    load_weights,
    load_window,
    newest_whole_step,
    remove_states,
    save_state,
)
from mtp_train.train.stopping import Signals, noted_signal, stopped_after

_LOG = logging.getLogger(__name__)


@dataclass
class Window:
    """Sums since the last log line."""

    loss_sum_K: list[float]
    targets_K: list[float]
    tokens: int = 0
    seconds_before: float = 0.0
    """Seconds of the window before this process resumed the run."""
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def empty(cls, num_depths: int) -> Window:
        """Start a window."""
        return cls([0.0] * num_depths, [0.0] * num_depths)

    @property
    def seconds(self) -> float:
        """Seconds of training since the last log line."""
        return self.seconds_before + time.perf_counter() - self.started

    def saved(self) -> dict[str, Any]:
        """Return the constructor arguments of the window, for a resume state."""
        sums = {"loss_sum_K": self.loss_sum_K, "targets_K": self.targets_K, "tokens": self.tokens}
        return {**sums, "seconds_before": self.seconds}


@dataclass
class Run:
    """The objects that a training step uses."""

    recipe: Recipe
    plan: Plan
    accelerator: Accelerator
    head: MtpHead
    wrapped: nn.Module
    optimizer: Any
    selection: Selection | None
    state_dir: Path
    log: RunLog | None
    window: Window


def make_optimizer(head: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Build AdamW over the head; weight decay on matrices only."""
    matrices = [parameter for parameter in head.parameters() if parameter.requires_grad and parameter.ndim > 1]
    vectors = [parameter for parameter in head.parameters() if parameter.requires_grad and parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # LoRA trains no vectors. Leave the empty group out, which DeepSpeed does not expect.
    groups = [group for group in groups if group["params"]]
    beta1, beta2 = recipe.train.betas
    return torch.optim.AdamW(groups, lr=recipe.train.lr, betas=(beta1, beta2))


def train_head(
    module: HeadTraining,
    *,
    recipe: Recipe,
    plan: Plan,
    batch_fn: BatchFn,
    accelerator: Accelerator,
    state_dir: Path,
    make_log: Callable[[int], RunLog | None],
    on_step: Callable[[int], None],
    cache: HiddenCache | None = None,
    selection: Selection | None = None,
) -> dict[str, Tensor]:
    """Train the head from the newest saved state to the last step.

    Args:
        module: Trunk and head.
        recipe: The recipe.
        plan: The recipe's numbers for this world size.
        batch_fn: From a step (0-based) to its packed sequences, the same on every rank.
        accelerator: Built with ``gradient_accumulation_steps=plan.accumulation``.
        state_dir: Directory of resume states.
        make_log: From the step to resume at to the open log; None on ranks that do not log.
        on_step: Called after each step with the number of steps done, for a progress bar.
        cache: The trunk's hidden states; None computes them in every step.
        selection: Selects the best head during training; None takes the last head.

    Returns:
        The trained weights, whole on every rank; with LoRA, its matrices. ``module`` may be left in shards.

    Raises:
        TrainingError: The loss or the gradient is not finite, or the ranks are not joined.
        StoppedError: A process received SIGTERM or SIGINT; the state is saved.
    """
    head = module.head
    done = resume(state_dir, head, selection, accelerator)
    if is_over(done, plan, selection):
        return chosen_weights(head, selection)
    wrapped, prepared = prepare(module, make_optimizer(head, recipe), accelerator, plan, recipe.train.max_grad_norm)
    if done:
        load_moments(state_dir, done, head, prepared)
    saved = load_window(state_dir, done) if done else None
    log, window = make_log(done), Window(**saved) if saved else Window.empty(module.num_depths)
    run = Run(recipe, plan, accelerator, head, wrapped, prepared, selection, state_dir, log, window)
    on_step(done)
    wrapped.train()
    prepared = Preparation.of(recipe, plan, accelerator, cache).steps(batch_fn, done)
    with noted_signal() as signals, Feed(prepared, accelerator.device) as feed:
        done = take_steps(run, done, feed, on_step, signals)
    accelerator.wait_for_everyone()
    if log is not None:
        log.close()
    if not is_over(done, plan, selection):
        raise stopped_after(state_dir.parent, done, plan.max_steps, signals)
    return chosen_weights(head, selection)


def resume(state_dir: Path, head: MtpHead, selection: Selection | None, accelerator: Accelerator) -> int:
    """Load the newest whole state's weights and best head; return its step, 0 if there is none.

    Broken states are removed, and named in a warning.
    """
    done, broken = newest_whole_step(state_dir)
    # As the main process finds it, which also waits until all processes have looked: states are removed below.
    done = broadcast_object_list([done])[0]
    accelerator.wait_for_everyone()
    if broken and accelerator.is_main_process:
        remove_states(broken)
        _LOG.warning("%s; resuming from the state of step %d", "; ".join(broken.values()), done)
    if done:
        load_weights(state_dir, done, head)
        if selection is not None:
            selection.best = load_best(state_dir, done)
    return done


def take_steps(run: Run, done: int, feed: Feed, on_step: Callable[[int], None], signals: Signals) -> int:
    """Train from step ``done`` until the end or a signal; return the number of steps done."""
    told_to_stop = False
    while not (told_to_stop or is_over(done, run.plan, run.selection)):
        sequences = feed.sequences()
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run.recipe, done)
        given = feed.micro_batches(run.plan.accumulation)
        sums_2K, norm_1 = optimise(run.wrapped, run.optimizer, run.accelerator, run.recipe, given)
        norm, told_to_stop = gather(run, sums_2K, norm_1, sequences, signals.number is not None)
        done += 1
        finish_step(run, done, norm, sequences, saves=told_to_stop)
        on_step(done)
    return done


def is_over(done: int, plan: Plan, selection: Selection | None) -> bool:
    """Return whether training is over after ``done`` steps."""
    return done >= plan.max_steps or (selection is not None and selection.is_exhausted)


def chosen_weights(head: MtpHead, selection: Selection | None) -> dict[str, Tensor]:
    """Return the last weights, or the best ones."""
    return head_state(head) if selection is None else selection.best_weights()


def optimise(
    wrapped: nn.Module, optimizer: Any, accelerator: Accelerator, recipe: Recipe, micro_batches: Iterable[MicroBatch]
) -> tuple[Tensor, Tensor]:
    """Do one optimiser step over this rank's micro-batches of it, without waiting for the device.

    Returns:
        Each depth's loss sum and number of counted targets on this rank, shape (2, K), and the gradient norm, (1,).
    """
    sums_2K = torch.zeros(2, recipe.head.num_depths, device=accelerator.device)
    norm_1 = sums_2K.new_zeros(1)
    for micro in micro_batches:
        with accelerator.accumulate(wrapped):
            terms = wrapped(*micro.batch, micro.scale_K, micro.hidden_BTD, known=micro.known)
            accelerator.backward(terms.total)
            sums_2K += torch.stack([terms.sum_K, terms.count_K])
            if accelerator.sync_gradients:
                norm_1 += clip_gradient(accelerator, wrapped, recipe.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return sums_2K, norm_1


def gather(
    run: Run, sums_2K: Tensor, norm_1: Tensor, sequences: Sequence[PackedSequence], told_to_stop: bool
) -> tuple[float, bool]:
    """Add one step's sums over all ranks to the window; return its gradient norm, and whether any rank shall stop.

    The host waits for the device here, once in a step.
    """
    told_1 = sums_2K.new_full((1,), float(told_to_stop))
    reduced = run.accelerator.reduce(torch.cat([sums_2K.flatten(), told_1]), reduction="sum")
    *sums, told, norm = torch.cat([reduced, norm_1]).tolist()
    num_depths = sums_2K.shape[1]
    for depth in range(num_depths):
        run.window.loss_sum_K[depth] += sums[depth]
        # Counted targets: with objective.on_policy they are fewer than the targets of the text.
        run.window.targets_K[depth] += sums[num_depths + depth]
    for sequence in sequences:
        run.window.tokens += int((sequence.document_T >= 0).sum())
    return norm, told > 0


def finish_step(run: Run, done: int, norm: float, sequences: Sequence[PackedSequence], *, saves: bool) -> None:
    """Check, log, measure and save after ``done`` steps, as far as each is due."""
    train, accelerator, selection = run.recipe.train, run.accelerator, run.selection
    require_finite(run, done, norm, sequences)
    if done % train.log_steps == 0 or done == run.plan.max_steps:
        if run.log is not None:
            facts = run_facts(accelerator, run.wrapped, train.precision)
            run.log.log(done, log_line(run.window, run.recipe, norm, learning_rate(run.recipe, done - 1)) | facts)
        run.window = Window.empty(run.recipe.head.num_depths)
    if selection is not None and selection.is_due(done, run.plan.max_steps):
        figures = selection.measure(run.wrapped, run.head, run.recipe.head.num_depths, accelerator)
        selection.judge(done, figures["held_out_tau"], run.head, writes=accelerator.is_main_process)
        if run.log is not None:
            run.log.log(done, figures)
    if saves or done % train.save_steps == 0 or is_over(done, run.plan, selection):
        best = None if selection is None else selection.best
        window = run.window.saved()
        save_state(run.state_dir, done, run.head, run.optimizer, best, window, writes=accelerator.is_main_process)


def require_finite(run: Run, done: int, norm: float, sequences: Sequence[PackedSequence]) -> None:
    """Check that the step's loss and gradient are finite. If not, the batch is written to a file for inspection.

    Raises:
        TrainingError: The loss or the gradient is not finite.
    """
    if math.isfinite(norm) and all(math.isfinite(value) for value in run.window.loss_sum_K):
        return
    kept = run.state_dir.parent / f"bad_batch-{done:08d}.safetensors"
    if run.accelerator.is_main_process:
        save_file(collate(list(sequences)), kept)
    raise TrainingError(
        f"step {done}: loss {run.window.loss_sum_K}, gradient norm {norm}; expected finite numbers. Lower train.lr, or "
        f"look at the step's tokens in {kept}; the last saved state is untouched."
    )


def log_line(window: Window, recipe: Recipe, norm: float, lr: float) -> dict[str, Any]:
    """Return the numbers of one log line from a window."""
    per_depth = [
        total / count if count else None for total, count in zip(window.loss_sum_K, window.targets_K, strict=True)
    ]
    weights = depth_weights(len(per_depth), recipe.objective.depth_decay)
    seconds = window.seconds
    return {
        "loss": sum(weight * (loss or 0.0) for weight, loss in zip(weights, per_depth, strict=True)),
        **{f"loss_depth_{depth + 1}": loss for depth, loss in enumerate(per_depth)},
        "lr": lr,
        "grad_norm": norm,
        "tokens": window.tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(window.tokens / seconds, 1),
    }
