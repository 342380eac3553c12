"""Look at the numbers in checkpoints with one block of a tensor in memory at a time: find NaN, compare two trunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint, all_finite
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.native import trunk_tensors
from mtp_train.checkpoints.quantised import is_scale
from mtp_train.errors import CheckpointError

_PIECE = 1 << 18
"""Numbers that are compared at once: few enough for the cache of a processor."""
_IN_FP32 = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
"""Types whose numbers fp32 holds exactly."""
_RUN = 256
"""Squares that are summed in fp32."""
_SMALLEST = 1e-31
"""Mean square above which the squares that underflow change the sum by less than 1e-6 of it."""


def find_non_finite(checkpoint: Checkpoint, progress: Progress) -> list[str]:
    found = []
    for key in progress.track(sorted(checkpoint.tensors), description=f"looking for NaN in {checkpoint.path.name}"):
        if not all(all_finite(block) for block in checkpoint.read_in_blocks(key)):
            found.append(key)
    return found


def require_finite_checkpoint(checkpoint: Checkpoint, progress: Progress) -> None:
    """Raise a CheckpointError that names the first tensor with NaN or infinities."""
    found = find_non_finite(checkpoint, progress)
    if found:
        raise CheckpointError(
            f"{checkpoint.path}: {found[0]} holds NaN or infinite values ({len(found)} such tensors); expected finite "
            "weights. Use a checkpoint saved before training diverged."
        )


def common_tensors(
    checkpoint: Checkpoint, layout: HeadLayout, base: Checkpoint, base_layout: HeadLayout
) -> dict[str, tuple[str, str]]:
    """Return the trunk tensors that both checkpoints have: name, sorted, to the key in each checkpoint.

    These are all tensors, unless the two checkpoints are quantised differently. Scales are left out: they are part of
    the weights that they belong to.
    """
    ours, theirs = trunk_tensors(checkpoint, layout), trunk_tensors(base, base_layout)
    if layout.lm_head_key in checkpoint.tensors and base_layout.lm_head_key in base.tensors:
        name = layout.family.keys.lm_head
        ours[name], theirs[name] = layout.lm_head_key, base_layout.lm_head_key
    names = sorted(name for name in ours.keys() & theirs.keys() if not is_scale(ours[name], checkpoint.tensors))
    return {name: (ours[name], theirs[name]) for name in names}


def squared_change(ours: Iterator[Tensor], theirs: Iterator[Tensor]) -> tuple[float, float]:
    """Return ``|W - W0|^2`` and ``|W0|^2`` over the rows that both tensors have, whatever their dtypes and blocks."""
    change, size = 0.0, 0.0
    for new, old in paired_rows(ours, theirs):
        for new_X, old_X in zip(*(torch.split(one.reshape(-1), _PIECE) for one in (new, old)), strict=True):
            wide = torch.float32 if {new_X.dtype, old_X.dtype} <= _IN_FP32 else torch.float64
            new_X, old_X = new_X.to(wide), old_X.to(wide)
            change += _squared_norm(new_X - old_X)
            size += _squared_norm(old_X)
    return change, size


def _squared_norm(values_X: Tensor) -> float:
    """Return ``|x|^2``: products in fp32, short sums in fp32, and their sum in fp64."""
    squared = values_X.square()
    whole = len(values_X) // _RUN * _RUN
    total = float(squared[:whole].view(-1, _RUN).sum(dim=1).double().sum() + squared[whole:].double().sum())
    # The square of a number above 1e19 overflows, and one below 1e-19 loses digits. Weights seldom have such sizes.
    if _SMALLEST * len(values_X) < total < float("inf") or not values_X.any():
        return total
    return float(values_X.double().square().sum())


def paired_rows(ours: Iterator[Tensor], theirs: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same rows of two tensors that come in blocks of different sizes, to the end of the shorter tensor.

    An embedding may have been resized, and packed weights come in blocks of more rows.
    """
    ours, theirs = map(_in_rows, ours), map(_in_rows, theirs)
    mine, other = next(ours, None), next(theirs, None)
    while mine is not None and other is not None:
        rows = min(len(mine), len(other))
        yield mine[:rows], other[:rows]
        mine = mine[rows:] if len(mine) > rows else next(ours, None)
        other = other[rows:] if len(other) > rows else next(theirs, None)


def _in_rows(block: Tensor) -> Tensor:
    return block if block.ndim else block[None]
