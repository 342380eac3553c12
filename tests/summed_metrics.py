"""Teacher-forced metrics of packed text, with the sums over batches that training takes over processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.head import Head
from mtp_train.train.packed_rows import AlignedRows
from mtp_train.train.teacher_forced import DenseSums, dense_sums, many_rows
from mtp_train.trunk.load import Trunk
from tiny import rows_on


class DenseMetrics(NamedTuple):
    """The ratios of sums, those of depths as lists."""

    num_targets: list[int]
    agreement: list[float | None]
    overlap: list[float | None]
    target_entropy: float | None
    tau_greedy: float | None
    tau_sampled: float | None


def ratios_of(sums: DenseSums) -> DenseMetrics:
    """Return the figures of a line of the log."""
    found = sums.figures()
    depths = range(1, 1 + len(sums.targets_K))
    agreement, overlap = ([found[f"held_out_{name}_depth_{k}"] for k in depths] for name in ("agreement", "overlap"))
    taus = found["held_out_tau"], found["held_out_tau_sampled"]
    return DenseMetrics([int(one) for one in sums.targets_K], agreement, overlap, found["held_out_entropy"], *taus)


@torch.inference_mode()
def dense_metrics(trunk: Trunk, head: Head, batches: Iterable[PackedBatch], num_depths: int) -> DenseMetrics:
    """Measure a head on packed text."""
    with many_rows(trunk, head) as run:
        return metrics_of(trunk, run, (rows_on(trunk, run, batch, num_depths) for batch in batches))


def metrics_of(trunk: Trunk, head: Head, rows: Iterable[AlignedRows]) -> DenseMetrics:
    """Return the ratios of the sums over some rows."""
    sums = zip(*(dense_sums(one, trunk, head) for one in rows), strict=True)
    return ratios_of(DenseSums(*map(sum, sums)))
