"""Teacher-forced metrics of packed text, with the sums over batches that training takes over processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.module import MtpHead
from mtp_train.train.packed_rows import AlignedRows, aligned_rows
from mtp_train.train.teacher_forced import DenseMetrics, DenseSums, dense_sums, many_rows
from mtp_train.trunk.load import Trunk


@torch.inference_mode()
def dense_metrics(trunk: Trunk, head: MtpHead, batches: Iterable[PackedBatch], num_depths: int) -> DenseMetrics:
    """Measure a head on packed text."""
    with many_rows(trunk, head) as run:
        return metrics_of(trunk, run, (aligned_rows(trunk, run, batch, num_depths) for batch in batches))


def metrics_of(trunk: Trunk, head: MtpHead, rows: Iterable[AlignedRows]) -> DenseMetrics:
    """Return the ratios of the sums over some rows."""
    sums = zip(*(dense_sums(one, trunk, head) for one in rows), strict=True)
    return DenseMetrics.of(DenseSums(*map(sum, sums)))
