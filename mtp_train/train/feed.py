"""Prepare the micro-batches of training on the host, one ahead, and copy them to the device.

Packing, collating, reading cached hidden states, counting targets and planning the trunk's passes need no device.
:class:`Feed` does these for the next micro-batch in another thread while the device computes the one before, and copies
to a GPU from page-locked memory on a stream of its own. The host never waits for the device here.

A step's batches depend on the number of the step alone, so a resumed run gets those of an unbroken one, and an error of
the data is raised at the step that has it. torch's DataLoader reads ahead in other processes only, each with a copy of
the documents.

Shapes: B rows, T tokens, K depths, N = B * T target rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from mtp_train.data.pack import PackedSequence, collate, count_targets
from mtp_train.heads.alignment import valid_targets
from mtp_train.losses.chunked import align_to_targets
from mtp_train.train.head_training import Known
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.packed_rows import Forwards, PackedBatch, Segment, group_by_length, segments
from mtp_train.train.plan import Plan
from mtp_train.train.shard import shards_trunk

BatchFn = Callable[[int], Sequence[PackedSequence]]


def works_ahead(device: torch.device) -> bool:
    """Return whether to prepare steps in another thread: a CPU's cores are busy with the steps themselves."""
    return device.type != "cpu"


def streams_of(device: torch.device) -> Any:
    """Return torch's module of a device that copies from page-locked memory while it computes; None for others."""
    return torch.get_device_module(device) if device.type in ("cuda", "xpu") else None


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward of :class:`HeadTraining`."""

    batch: PackedBatch
    scale_K: Tensor
    known: Known
    hidden_BTD: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        hidden = [] if self.hidden_BTD is None else [self.hidden_BTD]
        return [*self.batch, self.scale_K, self.known.used_N, *hidden]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        *batch, scale_K, used_N = map(change, self.tensors[:6])
        hidden_BTD = None if self.hidden_BTD is None else change(self.hidden_BTD)
        return MicroBatch(PackedBatch(*batch), scale_K, replace(self.known, used_N=used_N), hidden_BTD)


class Prepared(NamedTuple):
    """A micro-batch of this process, and the sequences of its step over all processes."""

    micro_batch: MicroBatch
    sequences: Sequence[PackedSequence]


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
        pins = streams_of(accelerator.device) is not None
        return cls(plan, weight_K, accelerator.process_index, cache, shards_trunk(accelerator), pins)

    def steps(self, batch_fn: BatchFn, first: int) -> Iterator[Prepared]:
        """Yield the micro-batches of every step from ``first`` to the last one of the run, on the host."""
        for step in range(first, self.plan.max_steps):
            yield from self.step(batch_fn(step))

    def step(self, sequences: Sequence[PackedSequence]) -> Iterator[Prepared]:
        plan, depths = self.plan, len(self.weight_K)
        totals = [sum(column) for column in zip(*(count_targets(one, depths) for one in sequences), strict=True)]
        rounds = plan.world_size * plan.accumulation
        pairs = zip(self.weight_K, totals, strict=True)
        scale_K = torch.tensor([rounds * weight / max(1, total) for weight, total in pairs])
        for micro in range(plan.accumulation):
            batch = self._micro_batch(sequences, micro, scale_K)
            yield Prepared(batch.mapped(Tensor.pin_memory) if self.pins else batch, sequences)

    def _micro_batch(self, sequences: Sequence[PackedSequence], micro: int, scale_K: Tensor) -> MicroBatch:
        own = list(sequences[self.plan.share(micro, self.rank)])
        batch = PackedBatch(*collate(own).values())
        depths = range(1, len(self.weight_K) + 1)
        valid = [valid_targets(batch.document_BT, batch.loss_mask_BT, depth) for depth in depths]
        used_N = align_to_targets(valid).flatten(1, 2).any(dim=0).nonzero().squeeze(1)
        if self.cache is not None:
            return MicroBatch(batch, scale_K, Known(None, used_N), self.cache.rows(own, pins=self.pins))
        return MicroBatch(batch, scale_K, Known(self._forwards(sequences, micro), used_N), None)

    def _forwards(self, sequences: Sequence[PackedSequence], micro: int) -> Forwards:
        groups = self._groups(sequences, micro, self.rank)
        if not self.in_shards:
            return Forwards(groups, len(groups))
        ranks = range(self.plan.world_size)
        return Forwards(groups, max(len(self._groups(sequences, micro, rank)) for rank in ranks))

    def _groups(self, sequences: Sequence[PackedSequence], micro: int, rank: int) -> list[list[Segment]]:
        document_BT = np.stack([one.document_T for one in sequences[self.plan.share(micro, rank)]])
        return group_by_length(segments(document_BT), document_BT.size)


class Feed:
    """The micro-batches of consecutive steps, on the device; a context that ends the thread.

    Args:
        prepared: The micro-batches on the host, in order. They are made one at a time, from another thread where the
            device lets it.
    """

    def __init__(self, prepared: Iterator[Prepared], device: torch.device) -> None:
        self._prepared = prepared
        self._device = device
        self._threads = ThreadPoolExecutor(max_workers=1) if works_ahead(device) else None
        self._making: Future[Prepared] | None = None
        self._made: Prepared | None = None
        self._is_sent = False
        self._streams = streams_of(device)
        self._copies: Any = None if self._streams is None else self._streams.Stream(device)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def sequences(self) -> Sequence[PackedSequence]:
        return self._next().sequences

    def micro_batches(self, count: int) -> Iterator[MicroBatch]:
        """Yield the next micro-batches on the device.

        When the caller has launched the work of one and asks for more, the copy of the following one begins, also after
        the last: its step may wait for the device, but the copy does not.
        """
        for _ in range(count):
            batch = self._send(self._next().micro_batch)
            self._made, self._is_sent = None, False
            if self._threads is not None:
                self._making = self._threads.submit(next, self._prepared)
            self._receive(batch)
            yield batch
            self._send_ahead()

    def _send_ahead(self) -> None:
        """Send the next micro-batch if it is made; an error, or the end of the run, waits until it is asked for."""
        if self._making is not None and self._making.done() and self._making.exception() is None:
            made = self._next()
            self._made, self._is_sent = made._replace(micro_batch=self._send(made.micro_batch)), True

    def _next(self) -> Prepared:
        if self._made is None:
            self._made = next(self._prepared) if self._making is None else self._making.result()
            self._making = None
        return self._made

    def _send(self, batch: MicroBatch) -> MicroBatch:
        """Begin to copy a micro-batch to the device, unless that is done."""
        if self._is_sent:
            return batch
        if self._copies is None:
            return batch.mapped(lambda tensor: tensor.to(self._device))
        with self._streams.stream(self._copies):
            return batch.mapped(lambda tensor: tensor.to(self._device, non_blocking=True))

    def _receive(self, batch: MicroBatch) -> None:
        """Make later work on the device wait for the copies so far, and keep their memory until that work is done."""
        if self._copies is None:
            return
        current = self._streams.current_stream(self._device)
        current.wait_stream(self._copies)
        for tensor in batch.tensors:
            tensor.record_stream(current)
