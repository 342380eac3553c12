"""Find the checkpoint that a run exported: a run directory is accepted wherever a checkpoint is."""

from __future__ import annotations

import shlex
from pathlib import Path

from mtp_train.errors import CheckpointError

RECIPE_FILE = "recipe.yaml"
"""File name of the resolved recipe in a run directory."""
EXPORT = "export"
"""Directory of the exported checkpoint in a run directory."""
HEAD = "head"
"""Directory of the trained head in a run directory."""
_CONFIG_FILE = "config.json"


def exported_of(directory: Path) -> Path:
    """Return the checkpoint that the run, or the rescue, in a directory exported; another directory as it is.

    Raises:
        CheckpointError: The run has not exported one.
    """
    if not is_run(directory):
        # A rescue whose probe advised a graft has no recipe.
        is_rescue = not (directory / _CONFIG_FILE).exists() and (directory / EXPORT / _CONFIG_FILE).is_file()
        return directory / EXPORT if is_rescue else directory
    if not (directory / EXPORT).is_dir():
        again = shlex.quote(str(directory / RECIPE_FILE))
        raise CheckpointError(
            f"{directory}: the directory of a run that has exported no checkpoint; expected a checkpoint, or a run "
            f"that passed its gate. Finish it with 'mtp-train run {again}', or name its trunk."
        )
    return directory / EXPORT


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a recipe's run, and no checkpoint."""
    return (directory / RECIPE_FILE).is_file()
