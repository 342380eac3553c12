"""Looking for NaN and infinities, a block of a tensor in memory at a time."""

from __future__ import annotations

import torch
from rich.progress import Progress

from mtp_train.errors import CheckpointError
from mtp_train.weights.files import Checkpoint


def find_non_finite(checkpoint: Checkpoint, progress: Progress) -> list[str]:
    """Return the keys of floating-point tensors that hold NaN or infinities."""
    found = []
    for key in progress.track(sorted(checkpoint.tensors), description=f"looking for NaN in {checkpoint.path.name}"):
        blocks = checkpoint.read_in_blocks(key)
        if any(block.is_floating_point() and not torch.isfinite(block.float()).all() for block in blocks):
            found.append(key)
    return found


def require_finite_checkpoint(checkpoint: Checkpoint, progress: Progress) -> None:
    """Check that no weight of a checkpoint is NaN or infinite.

    Raises:
        CheckpointError: One is; the message names it.
    """
    found = find_non_finite(checkpoint, progress)
    if found:
        raise CheckpointError(
            f"{checkpoint.path}: {found[0]} holds NaN or infinite values ({len(found)} such tensors); expected finite "
            "weights. Use a checkpoint saved before training diverged."
        )
