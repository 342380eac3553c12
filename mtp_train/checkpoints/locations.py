"""Open a checkpoint by path, hub id or ``demo:NAME``."""

from __future__ import annotations

from pathlib import Path

from mtp_train.checkpoints.adapter import ADAPTER_CONFIG_FILE, is_adapter, merge_command
from mtp_train.checkpoints.artifact import HEAD_CONFIG_FILE
from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import Checkpoint, locate_checkpoint, open_checkpoint, read_json
from mtp_train.checkpoints.run_export import EXPORT, HEAD, is_run
from mtp_train.errors import CheckpointError


def open_location(location: str) -> Checkpoint:
    """Open a checkpoint given as a path, a hub id or ``demo:NAME``.

    Raises:
        CheckpointError: It is no checkpoint, or it is an adapter.
    """
    path = locate_checkpoint(resolve(location))
    refuse_adapter(path, location)
    return open_checkpoint(path)


def is_head_directory(path: Path) -> bool:
    """Return whether a directory is a head directory of ours, and no checkpoint."""
    return (path / HEAD_CONFIG_FILE).is_file()


def head_directory(location: str) -> Path | None:
    """Return the head directory at a location: itself, or that of a run without an export; None for a checkpoint."""
    path = Path(resolve(location)).expanduser()
    if is_run(path) and not (path / EXPORT).is_dir():
        path = path / HEAD
    return path if is_head_directory(path) else None


def refuse_adapter(path: Path, location: str) -> None:
    """Raise a CheckpointError, with the command that merges it, for an adapter where a checkpoint is expected."""
    if not is_adapter(path):
        return
    config = read_json(path / ADAPTER_CONFIG_FILE)
    base = config.get("base_model_name_or_path") or "BASE"
    raise CheckpointError(
        f"{location}: a peft adapter ({config.get('peft_type')}) of {base}, without a model; expected a checkpoint. "
        f"Run '{merge_command(str(base), location)}', or train on it unmerged with model.trunk={base} "
        f"model.adapter={location}."
    )
