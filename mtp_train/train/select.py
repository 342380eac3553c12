"""Keep the head whose drafts are accepted best on text that it is not trained on.

The loss says little about which head drafts best, and long training can make acceptance worse while it still falls.
Every so many steps all processes measure the head together, teacher-forced; the weights of the best measure are kept
beside the resume states, and returned in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mtp_train.data.pack import PackedSequence, collate, full_batches
from mtp_train.errors import TrainingError
from mtp_train.heads.module import MtpHead
from mtp_train.recipe import SelectSpec
from mtp_train.train.dense import DenseMetrics
from mtp_train.train.dense_sums import DenseSums
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.state import Best, best_weights, head_state, save_best


class Selection:
    """Measure, keep the best, say when to stop.

    Args:
        spec: The recipe's.
        sequences: Packed text to measure on, the same on every process.
        sequences_per_call: How many of them a process measures in one call.
        cache: The trunk's states of its documents, None to compute them.
        directory: Where resume states live.
        decode: Decodes with the head as it is and returns figures to log; None where no process holds a whole trunk.
    """

    def __init__(
        self,
        spec: SelectSpec,
        sequences: Sequence[PackedSequence],
        sequences_per_call: int,
        cache: HiddenCache | None,
        directory: Path,
        decode: Callable[[MtpHead], dict[str, float]] | None,
    ) -> None:
        self.spec = spec
        self.sequences = sequences
        self.sequences_per_call = sequences_per_call
        self.cache = cache
        self.directory = directory
        self.decode = decode
        self.best = Best()

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing got better for too long."""
        return self.spec.patience is not None and self.best.since >= self.spec.patience

    def is_due(self, done: int, max_steps: int) -> bool:
        """Say whether the head is to be measured after ``done`` steps."""
        return done % self.spec.every_steps == 0 or done == max_steps

    def measure(self, wrapped: nn.Module, head: MtpHead, num_depths: int, accelerator: Accelerator) -> dict[str, Any]:
        """Measure the head; every process must call it.

        Returns:
            Figures to log. ``held_out_tau`` is what heads are chosen by.

        Raises:
            TrainingError: The text has no target.
        """
        wrapped.eval()
        metrics = DenseMetrics.of(self._sums(wrapped, num_depths, accelerator))
        figures: dict[str, Any] = {"held_out_tau": metrics.tau_greedy, "held_out_tau_sampled": metrics.tau_sampled}
        for depth, (agreement, overlap) in enumerate(zip(metrics.agreement, metrics.overlap, strict=True), start=1):
            figures |= {f"held_out_agreement_depth_{depth}": agreement, f"held_out_overlap_depth_{depth}": overlap}
        figures["held_out_entropy"] = metrics.target_entropy
        if self.decode is not None and accelerator.is_main_process:
            figures |= self.decode(head)
        wrapped.train()
        if metrics.tau_greedy is None:
            raise TrainingError(
                "train.select.share: no round of decoding can begin in the text kept from training; expected at least "
                "one response of two tokens. Raise it."
            )
        return figures

    @torch.no_grad()
    def _sums(self, wrapped: nn.Module, num_depths: int, accelerator: Accelerator) -> DenseSums:
        world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
        zeros_K = torch.zeros(num_depths, device=device)
        total = DenseSums(zeros_K, zeros_K, zeros_K, zeros_K, zeros_K, zeros_K, torch.zeros((), device=device))
        # As many calls for every process: where the trunk is in shards, they run it together.
        for together in full_batches(self.sequences, world * self.sequences_per_call):
            own = together[rank * self.sequences_per_call :][: self.sequences_per_call]
            batch = {name: value.to(device) for name, value in collate(own).items()}
            hidden_BTD = None if self.cache is None else self.cache.rows(own).to(device)
            found = wrapped(
                batch["input_ids_BT"],
                batch["positions_BT"],
                batch["document_BT"],
                batch["loss_mask_BT"],
                zeros_K,
                hidden_BTD,
                measures=True,
            )
            total = total.plus(found)
        return DenseSums(*(accelerator.reduce(value, reduction="sum") for value in total))

    def judge(self, step: int, score: float, head: MtpHead, *, writes: bool) -> None:
        """Take note of a measure; the weights of a better one are kept. Every process must call it."""
        if self.best.step and score <= self.best.score:
            self.best = replace(self.best, since=self.best.since + 1)
            return
        self.best = Best(step, score)
        weights = head_state(head)
        if writes:
            save_best(self.directory, step, weights)

    def best_weights(self) -> dict[str, Tensor]:
        """Return the head that was measured best."""
        return best_weights(self.directory, self.best)
