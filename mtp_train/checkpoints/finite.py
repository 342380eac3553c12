"""Find NaN and infinities in a checkpoint, with one block of a tensor in memory at a time."""

from __future__ import annotations

import torch
from rich.progress import Progress
from torch import Tensor

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.errors import CheckpointError


def find_non_finite(checkpoint: Checkpoint, progress: Progress) -> list[str]:
    """Return the keys of floating-point tensors with NaN or infinities."""
    found = []
    for key in progress.track(sorted(checkpoint.tensors), description=f"looking for NaN in {checkpoint.path.name}"):
        if not all(all_finite(block) for block in checkpoint.read_in_blocks(key)):
            found.append(key)
    return found


def all_finite(block: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinities; true for integer and empty tensors."""
    if not block.is_floating_point() or not block.numel():
        return True
    # Minimum and maximum are NaN or infinite if any element is: one pass without a copy, ten times as fast as isfinite.
    # torch has no aminmax for float8.
    ends = torch.aminmax(block) if block.dtype.itemsize > 1 else torch.aminmax(block.float())
    return bool(torch.isfinite(torch.stack(ends)).all())


def require_finite_checkpoint(checkpoint: Checkpoint, progress: Progress) -> None:
    """Check that no weight of a checkpoint is NaN or infinite.

    Raises:
        CheckpointError: A weight is; the message names its tensor.
    """
    found = find_non_finite(checkpoint, progress)
    if found:
        raise CheckpointError(
            f"{checkpoint.path}: {found[0]} holds NaN or infinite values ({len(found)} such tensors); expected finite "
            "weights. Use a checkpoint saved before training diverged."
        )
