"""Train the demo's checkpoints: one optimiser loop, two losses.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from mtp_train.heads.alignment import shift_left, valid_targets
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.trunk.precision import resolve_precision

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run."""

    lr: float
    warmup_steps: int
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    last_lr_share: float = 0.02
    log_steps: int = 20


def learning_rate(settings: TrainSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of a 0-based step: linear warm-up, then a cosine decay to ``last_lr_share``."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / num_steps))
    return settings.lr * warm * (settings.last_lr_share + (1.0 - settings.last_lr_share) * cosine)


def train(
    modules: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], dict[str, Tensor]],
    settings: TrainSettings,
    *,
    num_steps: int,
) -> list[dict[str, float]]:
    """Minimise the sum of the losses from ``loss_of``, and return a log line every few steps."""
    device = next(modules.parameters()).device
    matrices = [parameter for parameter in modules.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in modules.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
    in_bf16 = resolve_precision("auto", device).precision == "bf16"
    log: list[dict[str, float]] = []
    window: list[dict[str, float]] = []
    started = time.perf_counter()
    modules.train()
    for step, batch in zip(range(num_steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, num_steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
            losses = loss_of(batch)
        sum(losses.values(), start=torch.zeros((), device=device)).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        window.append({name: float(loss.detach()) for name, loss in losses.items()})
        if (step + 1) % settings.log_steps == 0 or step + 1 == num_steps:
            means = {name: sum(line[name] for line in window) / len(window) for name in window[0]}
            log.append({"step": step + 1, **means, "seconds": time.perf_counter() - started})
            print({name: round(value, 4) for name, value in log[-1].items()}, flush=True)
            window.clear()
    modules.eval()
    return log


def joint_losses(trunk: PreTrainedModel, head: MtpHead, tokens_BT: Tensor, weights: list[float]) -> dict[str, Tensor]:
    """Return the weighted losses of the trunk and of each draft depth, with every row as its own document.

    Gradients of the head's loss reach the trunk, as in DeepSeek-V3 (arXiv:2412.19437, equation 25).
    """
    rows, columns = tokens_BT.shape
    device = tokens_BT.device
    document_BT = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    hidden_BTD = trunk.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    starts = unroll(
        head,
        hidden_BTD,
        tokens_BT,
        trunk.get_input_embeddings(),
        num_depths=len(weights),
        positions_BT=torch.arange(columns, device=device).expand(rows, columns),
        document_BT=document_BT,
    )
    everywhere_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    losses = {}
    # Depth 0 is the trunk itself: row t predicts token t+1.
    for depth, (hidden, weight) in enumerate(zip([hidden_BTD, *starts], [1.0, *weights], strict=True)):
        valid_BT = valid_targets(document_BT, everywhere_BT, depth)
        logits_NV = trunk.lm_head(hidden[valid_BT]).float()
        loss = cross_entropy(logits_NV, shift_left(tokens_BT, depth + 1, 0)[valid_BT])
        losses["trunk" if depth == 0 else f"depth_{depth}"] = weight * loss
    return losses


def answer_loss(trunk: PreTrainedModel, tokens_BT: Tensor, targets_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the next-token loss on the answers; ``targets_BT`` is ``IGNORED`` elsewhere."""
    hidden_BTD = trunk.model(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
    wanted_BT = targets_BT != IGNORED
    return cross_entropy(trunk.lm_head(hidden_BTD[wanted_BT]).float(), targets_BT[wanted_BT])


def shuffled_rows(rows_NT: Tensor, batch_rows: int, *, seed: int) -> Iterator[Tensor]:
    """Yield batches of rows for all epochs, in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order_N = torch.randperm(len(rows_NT), generator=generator)
        for chosen in order_N.split(batch_rows):
            if len(chosen) == batch_rows:
                yield rows_NT[chosen]
