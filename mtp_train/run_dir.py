"""The run directory: whose it is, how far its run got, and the verdict it ends with."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from mtp_train.errors import LostProcessError, OutputExistsError, StoppedError
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import dump_recipe
from mtp_train.weights.files import CONFIG_FILE, INDEX_FILE, Checkpoint, read_json
from mtp_train.weights.identity import RECORD_FILE
from mtp_train.weights.writing import write_json, write_text

FIRST_STAGE = "check"
OUTCOME_FILE, RECIPE_FILE, PROVENANCE_FILE = "outcome.json", "recipe.yaml", "provenance.json"
_PACKAGES = ("mtp-train", "torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy")


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``stage`` is ``done`` where every stage was reached."""

    exit_code: int
    reason: str
    message: str
    stage: str

    @property
    def finished(self) -> bool:
        """Whether a rerun has nothing left to do."""
        return self.stage == "done"


def read_outcome(run_dir: Path) -> Outcome | None:
    """Return the recorded outcome, None where there is none."""
    path = run_dir / OUTCOME_FILE
    return Outcome(**read_json(path)) if path.is_file() else None


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Record the outcome."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / OUTCOME_FILE, outcome.__dict__)


def is_main_process() -> bool:
    """Whether this process writes for all of a launch, by the launcher's word: also before accelerate is set up."""
    return os.environ.get("RANK", "0") == "0"


def forget_outcome(run_dir: Path) -> None:
    """Remove the outcome of an earlier attempt, so that what is there from now on is this one's."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        (run_dir / OUTCOME_FILE).unlink(missing_ok=True)


def record_failure(run_dir: Path, outcome: Outcome) -> Outcome | None:
    """Record how a process of a run failed.

    Its first process has the say, unless it only fails because another one did, or is told to stop for that: then the
    words of the one that failed first stay. The launcher's ranks count: processes that do not know one another all take
    themselves for the main one. What is wrong before there is data is wrong for all of them, and named for none.

    Returns:
        What stays instead; None where this outcome was recorded.
    """
    rank = int(os.environ.get("RANK", "0"))
    follows = outcome.reason in (LostProcessError.reason, StoppedError.reason)
    # A disk without room for the outcome must not hide what the error says.
    with contextlib.suppress(OSError):
        if (rank or follows) and (said := read_outcome(run_dir)) is not None:
            return said
        alone = rank > 0 and not follows and outcome.stage != FIRST_STAGE
        named = replace(outcome, message=f"process {rank}: {outcome.message}") if alone else outcome
        write_outcome(run_dir, named)
    return None


def require_ours(run_dir: Path, recipe: Recipe) -> None:
    """Check that a run directory is new, or holds a run of the same resolved recipe.

    Raises:
        OutputExistsError: It holds another recipe's run, or files that are not ours.
    """
    entries = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    if run_dir.exists() and not run_dir.is_dir():
        raise OutputExistsError(f"run_dir: {run_dir} is a file; expected a directory. Choose another run_dir.")
    # What a refused run leaves, and what a kill leaves of a claim.
    claims = {OUTCOME_FILE, PROVENANCE_FILE, RECORD_FILE}
    if entries <= claims | {f".{name}.tmp" for name in (*claims, RECIPE_FILE)}:
        return
    recorded = run_dir / RECIPE_FILE
    if not recorded.is_file():
        raise OutputExistsError(
            f"run_dir: {run_dir} holds files that are not a run's ({', '.join(sorted(entries)[:3])}); expected a new "
            "or empty directory. Choose another run_dir."
        )
    if not _is_recipe_of(recorded.read_text(encoding="utf-8"), recipe):
        raise OutputExistsError(
            f"run_dir: {run_dir} holds the run of another recipe ({recorded}); expected the same resolved recipe to "
            "resume. Choose another run_dir, or remove that one."
        )


def _is_recipe_of(recorded: str, recipe: Recipe) -> bool:
    """Whether a recorded recipe is this one. How a server is reached does not count: what it serves is proved anew."""
    if recorded == dump_recipe(recipe):
        return True
    now, before = recipe.data.regenerate, _recorded_regeneration(recorded)
    if now is None or now.endpoint is None or before.get("endpoint") is None:
        return False
    there = replace(
        now,
        endpoint=before["endpoint"],
        api_key_env=before.get("api_key_env"),
        concurrency=before.get("concurrency"),
    )
    return recorded == dump_recipe(replace(recipe, data=replace(recipe.data, regenerate=there)))


def _recorded_regeneration(recorded: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(recorded)["data"]["regenerate"]
    except (yaml.YAMLError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def claim(run_dir: Path, recipe: Recipe, provenance: dict[str, Any]) -> None:
    """Make the run directory ours: record the recipe and the provenance."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / RECIPE_FILE).is_file():
        write_json(run_dir / PROVENANCE_FILE, provenance)
        write_text(run_dir / RECIPE_FILE, dump_recipe(recipe))


def checkpoint_identity(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Identify a checkpoint by path, hub revision where there is one, and the hashes of its small files."""
    path = checkpoint.path.resolve()
    files = [checkpoint.path / file for file in (CONFIG_FILE, INDEX_FILE)]
    return {
        "name": name,
        "path": str(path),
        "revision": path.name if path.parent.name == "snapshots" else None,
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()},
    }


def environment_facts() -> dict[str, Any]:
    """Return versions, command line, git commit and hardware."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "versions": versions,
        "python": platform.python_version(),
        "argv": sys.argv,
        "git": _git_commit(),
        "hardware": {"device": device, "threads": torch.get_num_threads(), "platform": platform.platform()},
    }


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        # Slim images have no git.
        return None
    return commit.stdout.strip() or None


_LEFTOVERS = (
    ".offload-*",
    ".head.*",
    ".tuned.*",
    ".adapter.*",
    ".export.*",
    ".*.tmp",
    "figures/.*.tmp",
    "state/.step-*",
)


def clear_leftovers(run_dir: Path) -> None:
    """Remove what a kill left of writes that never got their final name."""
    for pattern in _LEFTOVERS:
        for path in run_dir.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
