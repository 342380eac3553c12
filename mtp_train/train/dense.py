"""Teacher-forced acceptance: at every position of the trunk's own text, what would each depth have drafted.

Unlike counts from decoding, it does not depend on where rounds begin, and it is the same for every draft depth, so it
compares heads with little noise. Sums are taken over everything before any ratio.

Shapes: K depths, N target rows, C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtp_train.acceptance import entropy, overlap
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.losses import CHUNK_ROWS
from mtp_train.train.module import Batch, aligned_rows


@dataclass(frozen=True)
class DenseMetrics:
    """Per depth, over all valid targets; ``None`` where a depth has none."""

    agreement: list[float | None]
    """Share of targets where argmax q = argmax p, given that p was conditioned on the text's own tokens."""
    overlap: list[float | None]
    """Mean of sum_v min(p, q): the expected acceptance of a sampled draft (arXiv:2211.17192, theorem 3.5)."""
    target_entropy: float | None
    """Mean entropy of p at depth 1's targets, nats."""
    num_targets: list[int]


@torch.inference_mode()
def dense_metrics(trunk: Trunk, head: MtpHead, batches: Iterable[Batch], num_depths: int) -> DenseMetrics:
    """Measure a head on packed text."""
    agreed = torch.zeros(num_depths, dtype=torch.float64)
    overlapped = torch.zeros(num_depths, dtype=torch.float64)
    counted = torch.zeros(num_depths, dtype=torch.float64)
    entropy_sum = 0.0
    for batch in batches:
        rows = aligned_rows(trunk, head, batch, num_depths)
        for chunk in rows.valid_KN.any(dim=0).nonzero().squeeze(1).split(CHUNK_ROWS):
            p_CV = torch.softmax(trunk.project(rows.teacher_ND[chunk]).float(), dim=-1)
            entropy_sum += float(entropy(p_CV)[rows.valid_KN[0, chunk]].sum())
            for depth in range(num_depths):
                valid_C = rows.valid_KN[depth, chunk]
                state_CD = rows.student_KND[depth, chunk].to(p_CV.dtype)
                q_CV = torch.softmax(head.module_for(depth + 1).project(state_CD, trunk.project).float(), dim=-1)
                agreed[depth] += float((q_CV.argmax(-1) == p_CV.argmax(-1))[valid_C].sum())
                overlapped[depth] += float(overlap(p_CV, q_CV)[valid_C].sum())
                counted[depth] += float(valid_C.sum())
    return DenseMetrics(
        agreement=_ratios(agreed, counted),
        overlap=_ratios(overlapped, counted),
        target_entropy=entropy_sum / float(counted[0]) if counted[0] else None,
        num_targets=[int(count) for count in counted],
    )


def _ratios(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    return [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
