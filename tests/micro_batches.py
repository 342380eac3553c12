"""A step's micro-batches on the device, as training feeds them, for tests that take their steps themselves."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from mtp_train.data.pack import PackedSequence
from mtp_train.train.feed import Feed, MicroBatch, Preparation
from mtp_train.train.plan import Plan


def micro_batches(
    sequences: Sequence[PackedSequence], weight_K: Sequence[float], plan: Plan, accelerator: Accelerator
) -> list[MicroBatch]:
    """Return this process's micro-batches of a step."""
    prepared = Preparation.of(plan, weight_K, accelerator, None).step(sequences)
    with Feed(prepared, accelerator.device) as feed:
        return list(feed.micro_batches(plan.accumulation))
