"""What was trained, written into the trunk's own layout: its names, shards and dtypes, every other byte as it was."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rich.progress import Progress

from mtp_train.errors import CheckpointError
from mtp_train.heads.diagnose import layout_of
from mtp_train.weights.adapter import Adapter, AdapterWeights, is_adapter, read_adapter
from mtp_train.weights.export import LinkMode
from mtp_train.weights.files import Checkpoint, open_checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.merge import plan_changes, write_merged
from mtp_train.weights.native import trunk_tensors
from mtp_train.weights.quantised import PLAIN_DTYPES


def write_tuned(source: Checkpoint, saved: Path, out: Path, *, link: LinkMode, progress: Progress) -> None:
    """Write ``source`` with what a training saved in the place of its trunk; its head is what it was.

    Args:
        source: The checkpoint that was fine-tuned; it is only read.
        saved: A checkpoint of the Trainer's, or a LoRA adapter.
        out: The new directory.
        link: Hard-link files without a changed tensor, or copy them.
        progress: Where to show progress.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: What was saved does not fit, a weight is not finite, or the disk is full.
    """
    layout = layout_of(source)
    adapter = read_adapter(saved) if is_adapter(saved) else whole_trunk(open_checkpoint(saved))
    changes = plan_changes(source, layout, adapter)
    if not adapter.pairs:
        require_all_changed(source, layout, changes.keys(), saved)
    write_merged(source, layout, changes, out, link=link, progress=progress)


def whole_trunk(saved: Checkpoint) -> Adapter:
    """Return a saved model as an adapter that puts each of the trunk's tensors in the place of the stored one."""
    layout = layout_of(saved)
    # What counts in whole numbers (a table of experts by token) does not learn.
    learnt = [key for key, info in saved.tensors.items() if info.dtype in PLAIN_DTYPES and not layout.is_head_key(key)]
    # Of a tied pair transformers saves the embedding alone.
    keeps_tied = layout.lm_head_key not in saved.tensors
    return Adapter(saved.path, AdapterWeights(saved), (), {}, {key: key for key in learnt}, keeps_tied)


def require_all_changed(source: Checkpoint, layout: HeadLayout, changed: Collection[str], saved: Path) -> None:
    """Check that nothing of the trunk stays what it was while the rest of it moves.

    Raises:
        CheckpointError: Something does.
    """
    trunk = trunk_tensors(source, layout).values()
    left = [key for key in trunk if source.tensors[key].dtype in PLAIN_DTYPES and key not in changed]
    if left:
        raise CheckpointError(
            f"{saved}: holds nothing in the place of {left[0]} ({len(left)} such tensors of {source.path}); expected "
            "all of the trunk. Its own files are whole: use them as they are, and please report it."
        )
