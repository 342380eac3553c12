"""Writing a head together with the trunk that it was trained on, where that trunk wears an adapter."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.progress import Progress

from mtp_train.weights.adapter import read_adapter
from mtp_train.weights.export import LinkMode, write_checkpoint
from mtp_train.weights.files import Checkpoint, open_checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.merge import plan_changes, write_merged
from mtp_train.weights.native import NativeHead


def write_adapted(
    source: Checkpoint,
    layout: HeadLayout,
    head: NativeHead,
    out: Path,
    *,
    adapter: Path | None,
    link: LinkMode,
    progress: Progress,
) -> None:
    """Write ``source`` with ``head`` to a new directory, an adapter merged into its trunk first.

    Args:
        source: The checkpoint under the adapter; it is only read.
        layout: Its head layout.
        head: The head to put in.
        out: The new directory.
        adapter: A LoRA adapter's directory, None for the trunk as it is.
        link: Hard-link unchanged files where the file system allows, or copy them all.
        progress: Where to show progress.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The adapter cannot be merged, a head tensor does not fit, or the disk is full.
    """
    if adapter is None:
        write_checkpoint(source, layout, head, out, link=link)
        return
    changes = plan_changes(source, layout, read_adapter(adapter))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        merged = Path(scratch) / "merged"
        write_merged(source, layout, changes, merged, link=link, progress=progress)
        # The links outlive the directory that they lead to.
        write_checkpoint(open_checkpoint(merged), layout, head, out, link="hard")
