"""The training loop, meant to be read from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mtp_train.data.pack import PackedSequence, collate, count_targets
from mtp_train.errors import TrainingError
from mtp_train.losses import depth_weights
from mtp_train.recipe import Recipe
from mtp_train.train.launch import clip_gradient, prepare, run_facts
from mtp_train.train.log import RunLog
from mtp_train.train.module import HeadTraining
from mtp_train.train.plan import Plan, learning_rate
from mtp_train.train.shard import whole_state
from mtp_train.train.state import load_moments, load_weights, save_state

BatchFn = Callable[[int], Sequence[PackedSequence]]


@dataclass
class Window:
    """Numbers gathered since the last log line."""

    loss_sum_K: list[float]
    targets_K: list[float]
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def empty(cls, num_depths: int) -> Window:
        """Start a window."""
        return cls([0.0] * num_depths, [0.0] * num_depths)


def make_optimizer(head: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Build AdamW over the head; weight decay on matrices only."""
    matrices = [parameter for parameter in head.parameters() if parameter.requires_grad and parameter.ndim > 1]
    vectors = [parameter for parameter in head.parameters() if parameter.requires_grad and parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.train.lr, betas=recipe.train.betas)


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
) -> dict[str, Tensor]:
    """Train the head from the newest saved state to the last step.

    Args:
        module: Trunk and head.
        recipe: The recipe.
        plan: Its numbers for this world size.
        batch_fn: Step (0-based) to the step's packed sequences, the same on every rank.
        accelerator: Built with ``gradient_accumulation_steps=plan.accumulation``.
        state_dir: Where resume states live.
        make_log: Given the step resumed from, opens the log (None on ranks that do not log).
        on_step: Called after each step with the number of steps done, for a progress bar.

    Returns:
        The trained weights, whole on every rank; ``module`` may be left in shards.

    Raises:
        TrainingError: The loss or the gradient is not finite, or the ranks are not joined.
    """
    head = module.head
    first_step = load_weights(state_dir, head)
    if first_step >= plan.max_steps:
        return whole_state(head)
    wrapped, prepared = prepare(module, make_optimizer(head, recipe), accelerator, plan, recipe.train.max_grad_norm)
    if first_step:
        load_moments(state_dir, first_step, head, prepared)
    facts = run_facts(accelerator, wrapped, recipe.train.precision)
    log = make_log(first_step)
    on_step(first_step)
    window = Window.empty(module.num_depths)
    wrapped.train()
    for step in range(first_step, plan.max_steps):
        for group in prepared.param_groups:
            group["lr"] = learning_rate(recipe, step)
        sequences = batch_fn(step)
        sums_K, norm = optimise(wrapped, prepared, accelerator, recipe, plan, sequences)
        gather(window, sums_K, sequences, accelerator)
        done = step + 1
        require_finite(done, window, norm)
        if log is not None and (done % recipe.train.log_steps == 0 or done == plan.max_steps):
            log.log(done, log_line(window, recipe, norm, learning_rate(recipe, step)) | facts)
            window = Window.empty(module.num_depths)
        if done % recipe.train.save_steps == 0 or done == plan.max_steps:
            save_state(state_dir, done, head, prepared, writes=accelerator.is_main_process)
        on_step(done)
    accelerator.wait_for_everyone()
    if log is not None:
        log.close()
    return whole_state(head)


def require_finite(done: int, window: Window, norm: float) -> None:
    """Raise a TrainingError where a step ended in numbers that nothing can be learned from."""
    if not math.isfinite(norm) or not all(math.isfinite(value) for value in window.loss_sum_K):
        raise TrainingError(
            f"step {done}: loss {window.loss_sum_K}, gradient norm {norm}; expected finite numbers. Lower "
            "train.lr, or check the data of this step; the last saved state is untouched."
        )


def optimise(
    wrapped: nn.Module,
    optimizer: Any,
    accelerator: Accelerator,
    recipe: Recipe,
    plan: Plan,
    sequences: Sequence[PackedSequence],
) -> tuple[Tensor, float]:
    """Do one optimiser step over the ranks' shares of ``sequences``; return this rank's loss sums and the norm.

    Losses are divided by the number of targets of the whole step, whatever rank or micro-batch they fall in, so the
    gradient is the same for every world size and accumulation. The wrapper's averaging over ranks and accelerate's
    over micro-batches are multiplied out again.
    """
    num_depths = recipe.head.num_depths
    totals = [sum(column) for column in zip(*(count_targets(one, num_depths) for one in sequences), strict=True)]
    weights = depth_weights(num_depths, recipe.objective.depth_decay)
    rounds = plan.world_size * plan.accumulation
    scale_K = torch.tensor(
        [rounds * weight / max(1, total) for weight, total in zip(weights, totals, strict=True)],
        device=accelerator.device,
    )
    sums_K = torch.zeros(num_depths, device=accelerator.device)
    norm = 0.0
    for micro in range(plan.accumulation):
        share = collate(list(sequences[plan.share(micro, accelerator.process_index)]))
        batch = {name: values.to(accelerator.device) for name, values in share.items()}
        with accelerator.accumulate(wrapped):
            terms = wrapped(
                batch["input_ids_BT"], batch["positions_BT"], batch["document_BT"], batch["loss_mask_BT"], scale_K
            )
            accelerator.backward(terms.total)
            sums_K += terms.sum_K
            if accelerator.sync_gradients:
                norm = clip_gradient(accelerator, wrapped, recipe.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return sums_K, norm


def gather(window: Window, sums_K: Tensor, sequences: Sequence[PackedSequence], accelerator: Accelerator) -> None:
    """Add one step's sums over all ranks to the window."""
    all_K = accelerator.reduce(sums_K, reduction="sum").tolist()
    num_depths = len(all_K)
    for sequence in sequences:
        for depth, count in enumerate(count_targets(sequence, num_depths)):
            window.targets_K[depth] += count
        window.tokens += int((sequence.document_T >= 0).sum())
    for depth in range(num_depths):
        window.loss_sum_K[depth] += all_K[depth]


def log_line(window: Window, recipe: Recipe, norm: float, lr: float) -> dict[str, Any]:
    """Turn a window into the numbers of one line."""
    per_depth = [
        total / count if count else None for total, count in zip(window.loss_sum_K, window.targets_K, strict=True)
    ]
    weights = depth_weights(len(per_depth), recipe.objective.depth_decay)
    seconds = time.perf_counter() - window.started
    return {
        "loss": sum(weight * (loss or 0.0) for weight, loss in zip(weights, per_depth, strict=True)),
        **{f"loss_depth_{depth + 1}": loss for depth, loss in enumerate(per_depth)},
        "lr": lr,
        "grad_norm": norm,
        "tokens": window.tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(window.tokens / seconds, 1),
    }
