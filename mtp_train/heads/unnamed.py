"""Describe the weight files that are no part of their checkpoint, and find a head in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtp_train.checkpoints.contents import unnamed_weights
from mtp_train.checkpoints.files import Checkpoint, TensorInfo
from mtp_train.checkpoints.keymap import HeadLayout


@dataclass(frozen=True)
class UnnamedFile:
    """A weight file in a checkpoint's directory that the checkpoint does not name: no copy contains it."""

    file: str
    """POSIX path in the directory."""
    num_tensors: int
    """0 for a file that is not safetensors or is damaged."""
    num_head_tensors: int

    def __str__(self) -> str:
        if not self.num_tensors:
            return f"{self.file} (not readable as safetensors)"
        of_head = f", {self.num_head_tensors} of a head" if self.num_head_tensors else ""
        return f"{self.file} ({self.num_tensors} tensors{of_head})"


def unnamed_files(checkpoint: Checkpoint, layout: HeadLayout | None) -> tuple[UnnamedFile, ...]:
    """Return the weight files that are no part of a checkpoint, sorted by path. Reads their headers.

    Args:
        checkpoint: The checkpoint.
        layout: Its head layout; None for a drafter, whose files have no trunk's layout.
    """
    is_head_key = layout.is_head_key if layout is not None else lambda key: False
    return tuple(
        UnnamedFile(file, len(tensors), sum(map(is_head_key, tensors)))
        for file, tensors in unnamed_weights(checkpoint).items()
    )


def with_unnamed_head(checkpoint: Checkpoint, layout: HeadLayout) -> Checkpoint:
    """Return a checkpoint with the head tensors of weight files that it does not name.

    The checkpoint itself is returned if it contains a head, if there are no such tensors, or if two files contain one
    under the same key, so that which to take is for the user to say.
    """
    if any(layout.is_head_key(key) for key in checkpoint.tensors):
        return checkpoint
    head: list[tuple[str, TensorInfo]] = [
        (key, info)
        for tensors in unnamed_weights(checkpoint).values()
        for key, info in tensors.items()
        if layout.is_head_key(key)
    ]
    copies = Counter(key for key, _ in head)
    if not head or max(copies.values()) > 1:
        return checkpoint
    return replace(checkpoint, tensors={**checkpoint.tensors, **dict(head)})


def left_out(files: Sequence[UnnamedFile]) -> tuple[str, ...]:
    """Return the sentence of a result that names the weight files that were not copied; empty without such files."""
    if not files:
        return ()
    return (f"Left out, as no part of the checkpoint: {', '.join(map(str, files))}.",)
