"""Plan the micro-batches of a step on the host: packing, collating, counting targets and dividing the trunk's passes.

The host makes the first micro-batch of a step while the device still computes the step before, and each of the others
while it computes the one before it. Where the device copies from page-locked memory, the host waits for it once in a
step, for the losses.

A step's batches depend on the number of the step alone, so a resumed run gets those of an unbroken one.

Shapes: B rows, T tokens, K depths, N = B * T target rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from mtp_train.data.pack import PackedSequence, collate, count_targets
from mtp_train.heads.alignment import valid_targets
from mtp_train.losses.chunked import align_to_targets
from mtp_train.train.head_training import MicroBatch
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.packed_rows import Forwards, Segment, group_by_length, segments
from mtp_train.train.plan import Plan
from mtp_train.train.shard import shards_trunk

_PINNING = ("cuda", "xpu")
"""Types of devices that copy from page-locked memory while they compute."""


@dataclass(frozen=True)
class Preparation:
    """Makes this process's micro-batches from the sequences of a step.

    Losses are divided by the number of targets of the whole step, over all processes and micro-batches, so the gradient
    is the same for every world size and accumulation. The factors undo the wrapper's averaging over processes and
    accelerate's averaging over micro-batches.

    Attributes:
        weight_K: The weight of each depth, which sum to 1.
        cache: The trunk's hidden states; None if the trunk computes them.
        in_shards: Whether all processes run the trunk's passes together.
        pins: Whether to put the tensors into page-locked memory.
    """

    plan: Plan
    weight_K: Sequence[float]
    rank: int
    cache: HiddenCache | None
    in_shards: bool
    pins: bool

    @classmethod
    def of(
        cls, plan: Plan, weight_K: Sequence[float], accelerator: Accelerator, cache: HiddenCache | None
    ) -> Preparation:
        pins = accelerator.device.type in _PINNING
        return cls(plan, weight_K, accelerator.process_index, cache, shards_trunk(accelerator), pins)

    def step(self, sequences: Sequence[PackedSequence]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a step, given its sequences over all processes."""
        plan, depths = self.plan, len(self.weight_K)
        totals = [sum(column) for column in zip(*(count_targets(one, depths) for one in sequences), strict=True)]
        rounds = plan.world_size * plan.accumulation
        pairs = zip(self.weight_K, totals, strict=True)
        scale_K = torch.tensor([rounds * weight / max(1, total) for weight, total in pairs])
        for micro in range(plan.accumulation):
            batch = self._micro_batch(sequences, micro, scale_K)
            yield batch.mapped(Tensor.pin_memory) if self.pins else batch

    def _micro_batch(self, sequences: Sequence[PackedSequence], micro: int, scale_K: Tensor) -> MicroBatch:
        own = list(sequences[self.plan.share(micro, self.rank)])
        batch = collate(own)
        depths = range(1, len(self.weight_K) + 1)
        valid = [valid_targets(batch.document_BT, batch.loss_mask_BT, depth) for depth in depths]
        used_N = align_to_targets(valid).flatten(1, 2).any(dim=0).nonzero().squeeze(1)
        if self.cache is not None:
            return MicroBatch(batch, scale_K, hidden_BTD=self.cache.rows(own), used_N=used_N)
        return MicroBatch(batch, scale_K, forwards=self._forwards(sequences, micro), used_N=used_N)

    def _forwards(self, sequences: Sequence[PackedSequence], micro: int) -> Forwards:
        groups = self._groups(sequences, micro, self.rank)
        if not self.in_shards:
            return Forwards(groups, len(groups))
        ranks = range(self.plan.world_size)
        return Forwards(groups, max(len(self._groups(sequences, micro, rank)) for rank in ranks))

    def _groups(self, sequences: Sequence[PackedSequence], micro: int, rank: int) -> list[list[Segment]]:
        document_BT = np.stack([one.document_T for one in sequences[self.plan.share(micro, rank)]])
        return group_by_length(segments(document_BT), document_BT.size)
