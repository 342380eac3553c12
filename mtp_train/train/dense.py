"""Teacher-forced acceptance: at every position of the trunk's own text, what would each depth have drafted.

Unlike counts from decoding, it does not depend on where rounds begin, and it is the same for every draft depth, so it
compares heads with little noise. Sums are taken over everything before any ratio.

Shapes: K depths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtp_train.heads.flex import Attention
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.heads.widen import many_rows
from mtp_train.train.dense_sums import DenseSums, sum_figures, target_figures
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
    median_entropy: float | None = None
    """Median entropy of p at these targets: how templated the text is."""
    tau_greedy: float | None = None
    """Tokens a round of greedy decoding, if a round began at every token of a response alike."""
    tau_sampled: float | None = None
    """Tokens a round of sampling at temperature 1, likewise."""

    @classmethod
    def of(cls, sums: DenseSums) -> DenseMetrics:
        """Turn sums into shares."""
        targets_K = sums.targets_K
        return cls(
            agreement=_ratios(sums.agreed_K, targets_K),
            overlap=_ratios(sums.overlapped_K, targets_K),
            target_entropy=float(sums.entropy / targets_K[0]) if targets_K[0] else None,
            num_targets=[int(count) for count in targets_K],
            tau_greedy=_tau(sums.chained_K, sums.reached_K),
            tau_sampled=_tau(sums.chained_overlap_K, sums.reached_K),
        )


@torch.inference_mode()
def dense_metrics(
    trunk: Trunk, head: MtpHead, batches: Iterable[Batch], num_depths: int, attention: Attention = "dense"
) -> DenseMetrics:
    """Measure a head on packed text, unrolled with that attention (``heads.step.unroll``)."""
    total: DenseSums | None = None
    entropies: list[Tensor] = []
    with many_rows(trunk, head) as run:
        for batch in batches:
            rows = aligned_rows(trunk, run, batch, num_depths, attention=attention)
            figures = target_figures(rows, trunk, run)
            entropies.append(figures.entropy_N[rows.valid_KN[0]])
            found = sum_figures(rows, figures)
            total = found if total is None else total.plus(found)
    if total is None:
        return DenseMetrics([], [], None, [])
    every_N = torch.cat(entropies)
    return replace(DenseMetrics.of(total), median_entropy=float(every_N.median()) if len(every_N) else None)


def _ratios(sums_K: Tensor, counts_K: Tensor) -> list[float | None]:
    return [float(total / count) if count else None for total, count in zip(sums_K, counts_K, strict=True)]


def _tau(chained_K: Tensor, reached_K: Tensor) -> float | None:
    """Return 1 + the sum of the marginal shares."""
    shares = [share for share in _ratios(chained_K, reached_K) if share is not None]
    return 1.0 + sum(shares) if shares else None
