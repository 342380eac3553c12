"""Find what a location names: a path, a run with its export, a hub id or ``demo:NAME``.

A run directory is accepted wherever a checkpoint is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtp_train.checkpoints.adapter import ADAPTER_CONFIG_FILE, is_adapter, merge_command, open_weights
from mtp_train.checkpoints.artifact import HEAD_CONFIG_FILE
from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import CONFIG_FILE, PICKLE_SUFFIXES, Checkpoint, is_gguf, open_checkpoint, read_json
from mtp_train.checkpoints.suggestions import command, probe_command, retrain_command
from mtp_train.errors import CheckpointError

RECIPE_FILE = "recipe.yaml"
"""File name of the resolved recipe in a run directory."""
EXPORT = "export"
"""Directory of the exported checkpoint in a run directory."""
HEAD = "head"
"""Directory of the trained head in a run directory."""


def open_location(location: str, *, trusts_code: bool = False) -> Checkpoint:
    """Open a checkpoint given as a path, a hub id or ``demo:NAME``."""
    path = locate_checkpoint(resolve(location))
    refuse_adapter(path, location)
    return replace(open_checkpoint(path), trusts_code=trusts_code)


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
        f"Run '{retrain_command(location, str(base))}' for a head that drafts for it, "
        f"'{probe_command(location, str(base))}' to see first whether that helps, or "
        f"'{merge_command(str(base), location)}'; in a recipe write model.trunk={base} model.adapter={location}."
    )


def locate_checkpoint(name: str) -> Path:
    """Return the directory of a checkpoint: a local path, the export of a run, or a hub id in the hub's cache.

    A GGUF file is dequantised into the cache.

    Raises:
        CheckpointError: It is neither a directory nor a hub id that can be downloaded, or a run without an export.
    """
    path = Path(name).expanduser()
    if is_gguf(path):
        # transformers loads with it.
        from mtp_train.checkpoints.gguf.model_file import dequantised

        return dequantised(path)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        return exported_of(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=[f"*{suffix}" for suffix in PICKLE_SUFFIXES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name}: neither a local directory nor a hub model that can be downloaded "
            f"({type(error).__name__}); expected one of them. Check the spelling, your network and your token."
        ) from None


def exported_of(directory: Path) -> Path:
    """Return the checkpoint that the run, or the rescue, in a directory exported; another directory as it is."""
    if not is_run(directory):
        # A rescue whose probe advised a graft has no recipe.
        is_rescue = not (directory / CONFIG_FILE).exists() and (directory / EXPORT / CONFIG_FILE).is_file()
        return directory / EXPORT if is_rescue else directory
    if not (directory / EXPORT).is_dir():
        raise CheckpointError(
            f"{directory}: the directory of a run that has exported no checkpoint; expected a checkpoint, or a run "
            f"that passed its gate. Finish it with '{command('run', directory / RECIPE_FILE)}', or name its trunk."
        )
    return directory / EXPORT


def is_run(directory: Path) -> bool:
    return (directory / RECIPE_FILE).is_file()


def locate_adapter(location: str, trunk: str) -> Path:
    """Return the directory of an adapter to apply unmerged. peft checks that it fits when it is put on the trunk.

    Raises:
        CheckpointError: There is no adapter; its weights are damaged or not finite; or it adapts modules of a
            vision-language model, which the text model that we load does not have.
    """
    path = locate_checkpoint(location)
    if not (path / ADAPTER_CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{location}: no {ADAPTER_CONFIG_FILE}; expected a peft adapter directory or a hub id. Check the spelling."
        )
    stored = open_weights(path)
    wrapped = next((key for key in stored.tensors if "language_model." in key or ".visual." in key), None)
    if wrapped is not None:
        raise CheckpointError(
            f"{location}: adapts {wrapped}, a module of the vision-language model; expected modules of the text model, "
            f"which alone is loaded. Run '{merge_command(trunk, location)}' and use the result."
        )
    return path
