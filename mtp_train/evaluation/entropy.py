"""Compare the overlap of two arms at equal target entropy: is a head better, or only its text easier?

Fine-tuning changes the entropy of the trunk's text, and that moves acceptance more than the head does (Bebop,
arXiv:2606.12370). Two arms are therefore compared within bins of the target's entropy. The differences of the bins are
averaged with weights ``a b / (a + b)``, as Mantel and Haenszel do (J. National Cancer Institute 22, 1959): a and b are
the shares of the arms' positions that lie in the bin. A bin without positions of one arm has weight 0, and a bin with
few of them has little weight. If both arms have the same distribution of entropies, the result is the ordinary
difference of means.

Shapes: P prompts, G groups of prompts, B bins, N target positions, X sets of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from mtp_train.acceptance.counts import FloatArray
from mtp_train.acceptance.intervals import Difference, judge_difference
from mtp_train.evaluation.dense import DenseRows

ENTROPY_EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Lower ends of the bins in nats; the last has no upper end."""
FINER = 4
"""Parts of each bin in the comparison. Within a wide bin, easier text still has the lower entropy."""
FINE_EDGES = (
    *(low + (high - low) * part / FINER for low, high in pairwise(ENTROPY_EDGES) for part in range(FINER)),
    ENTROPY_EDGES[-1],
)
"""Lower ends of the comparison's bins."""
MIN_COMMON_SHARE = 0.25
"""Minimum overlap of the arms' distributions over bins; arms with less in common are not compared."""


def overlap_difference(first: DenseRows, second: DenseRows, task: str | None = None) -> Difference | None:
    """Return the difference of mean overlap at depth 1 at equal target entropy, on the prompts that both arms decoded.

    Args:
        task: The task to compare; None for all tasks.

    Returns:
        None where the distributions of the arms over bins overlap by less than ``MIN_COMMON_SHARE``.
    """
    mine, theirs = (_groups(rows, task) for rows in (first, second))
    group_of = {prompt: group for prompt, group in mine.items() if prompt in theirs}
    names = {group: number for number, group in enumerate(dict.fromkeys(group_of.values()))}
    pair_G4B = np.concatenate([_sums(rows, group_of, names) for rows in (first, second)], axis=1)
    total_4B = pair_G4B.sum(axis=0)
    if not total_4B[0].any() or not total_4B[2].any() or _common_share(total_4B) < MIN_COMMON_SHARE:
        return None
    count_G2 = pair_G4B[:, ::2].sum(axis=-1)
    weight_G = (count_G2 / count_G2.sum(axis=0)).mean(axis=1)
    return judge_difference(float(_standardised(total_4B[None])[0]), _standardised(total_4B - pair_G4B), weight_G)


def _groups(rows: DenseRows, task: str | None) -> dict[str, str]:
    """Return the group of each prompt of a task."""
    prompts = zip(rows.prompt_ids.tolist(), rows.groups.tolist(), rows.tasks.tolist(), strict=True)
    return {prompt: group for prompt, group, its_task in prompts if task in (None, its_task)}


def _sums(rows: DenseRows, group_of: Mapping[str, str], names: Mapping[str, int]) -> FloatArray:
    """Return counts and summed overlaps of the positions at depth 1, shape (G, 2, B), by the bins of ``FINE_EDGES``.

    Args:
        group_of: The groups of the prompts that count.
        names: The index of each group.
    """
    prompts = rows.prompt_ids.tolist()
    group_P = np.array([names[group_of[one]] if one in group_of else -1 for one in prompts], dtype=np.int64)
    counted_N = rows.valid_KN[0] & (group_P[rows.prompt_N] >= 0)
    bin_N = np.searchsorted(np.array(FINE_EDGES), rows.entropy_N[counted_N], side="right") - 1
    place_N = group_P[rows.prompt_N[counted_N]] * len(FINE_EDGES) + np.maximum(bin_N, 0)
    flat = [
        np.bincount(place_N, weight_N, minlength=len(names) * len(FINE_EDGES))
        for weight_N in (None, rows.overlap_KN[0, counted_N])
    ]
    return np.stack([one.reshape(len(names), len(FINE_EDGES)).astype(np.float64) for one in flat], axis=1)


def _common_share(total_4B: FloatArray) -> float:
    """Return the overlap of the arms' distributions over the bins of ``ENTROPY_EDGES``, 0 to 1."""
    coarse_4B = np.add.reduceat(total_4B[::2], np.arange(0, total_4B.shape[1], FINER), axis=1)
    return float((coarse_4B / coarse_4B.sum(axis=1, keepdims=True)).min(axis=0).sum())


def _standardised(sums_X4B: FloatArray) -> FloatArray:
    """Return the weighted mean of the bins' differences for each X; NaN if no bin has positions of both arms."""
    counts_X2B, overlaps_X2B = sums_X4B[:, ::2], sums_X4B[:, 1::2]
    with np.errstate(divide="ignore", invalid="ignore"):
        share_X2B = counts_X2B / counts_X2B.sum(axis=-1, keepdims=True)
        weight_XB = np.nan_to_num(share_X2B.prod(axis=1) / share_X2B.sum(axis=1))
        mean_X2B = np.nan_to_num(overlaps_X2B / counts_X2B)
        difference_X: FloatArray = (weight_XB * (mean_X2B[:, 0] - mean_X2B[:, 1])).sum(axis=-1) / weight_XB.sum(axis=-1)
    return difference_X
