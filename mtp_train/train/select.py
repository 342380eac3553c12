"""Select the head with the best acceptance on text that it is not trained on.

The loss is a weak guide to acceptance: training can make acceptance worse while the loss still falls. Before the first
step and every ``train.select.every_steps`` steps all processes measure the head together, teacher-forced, and save a
resume state. Each state has the weights of the best measure so far, which are returned at the end: a training without a
gain returns the head that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from mtp_train.data.pack import PackedSequence, collate, full_batches
from mtp_train.errors import TrainingError
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.state import Best
from mtp_train.train.teacher_forced import DenseSums


def score_of(figures: Mapping[str, float]) -> float:
    """Return what heads are compared by: the mean of tau greedily and sampled, as both may be served.

    The overlaps of the second are less noisy; alone they also rise where a head gets flatter and drafts worse greedily.
    """
    return (figures["held_out_tau"] + figures["held_out_tau_sampled"]) / 2


@dataclass
class Selection:
    """Measures the head, and ends training when measures stop improving.

    Args:
        patience: Training ends after so many measures without a better one; None for no limit.
        lr_for: Called once before the first step, on every process, with the starting head's overlap of p and q at
            depth 1; returns the peak learning rate. None takes the options'.
    """

    every_steps: int
    patience: int | None
    sequences: Sequence[PackedSequence]
    lr_for: Callable[[float], float] | None = None
    best: Best = field(default_factory=Best)

    @property
    def is_exhausted(self) -> bool:
        return self.patience is not None and self.best.since >= self.patience

    def measure(self, wrapped: nn.Module, module: HeadTraining, accelerator: Accelerator) -> dict[str, Any]:
        """Measure the head; every process must call it.

        Args:
            wrapped: The module as accelerate has wrapped it.

        Returns:
            Figures to log, the same on every process. Heads are compared by :func:`score_of` them.

        Raises:
            TrainingError: The text has no target.
        """
        wrapped.eval()
        figures = self._sums(wrapped, module, accelerator).figures()
        wrapped.train()
        if figures["held_out_tau"] is None:
            raise TrainingError(
                "train.select.share: no round can begin in the text kept from training; expected a response of two "
                "tokens. Raise it."
            )
        # Sums of two processes may differ in their last bits: all take the same head and stop at the same step.
        return broadcast_object_list([figures])[0]

    @torch.no_grad()
    def _sums(self, wrapped: nn.Module, module: HeadTraining, accelerator: Accelerator) -> DenseSums:
        device = accelerator.device
        rank = accelerator.process_index
        total_FK = torch.zeros(len(DenseSums._fields), module.num_depths, device=device)
        # Every process makes the same number of calls: with a trunk in shards they run it together.
        for together in full_batches(self.sequences, accelerator.num_processes):
            prepared = module.states.prepare([[one] for one in together], rank)
            micro = MicroBatch(collate([together[rank]]), torch.zeros(module.num_depths), prepared)
            total_FK += torch.stack(wrapped(micro=micro.to(device), measures=True))
        return DenseSums(*accelerator.reduce(total_FK, reduction="sum"))

    def judge(self, step: int, score: float) -> None:
        """Record a measure: the best so far, or one without a gain."""
        if step and score <= self.best.score:
            self.best = replace(self.best, since=self.best.since + 1)
        else:
            self.best = replace(self.best, step=step, score=score, since=0) if step else Best(0, score, start=score)
