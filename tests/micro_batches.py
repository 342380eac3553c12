"""A step's micro-batches on the device, as training takes them, for tests that take their steps themselves."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from mtp_train.data.pack import PackedSequence
from mtp_train.train.feed import Preparation
from mtp_train.train.head_training import MicroBatch
from mtp_train.train.plan import Plan


def micro_batches(
    sequences: Sequence[PackedSequence], weight_K: Sequence[float], plan: Plan, accelerator: Accelerator
) -> list[MicroBatch]:
    """Return this process's micro-batches of a step."""
    prepared = Preparation.of(plan, weight_K, accelerator, None).step(sequences)
    return [micro.to(accelerator.device) for micro in prepared]
