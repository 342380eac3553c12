"""Manage the run directory: hold and claim it, record the outcome, and keep the precision of a resumed run.

A claimed directory has ``recipe.yaml`` (the resolved recipe) and ``provenance.json``. ``outcome.json`` is how the last
attempt ended. ``run.lock`` names the process that writes to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import SoftFileLease, Timeout
from rich.console import Console

from mtp_train.checkpoints.artifact import HEAD_CONFIG_FILE
from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import CONFIG_FILE, INDEX_FILE, Checkpoint, read_json
from mtp_train.checkpoints.identity import RECORD_FILE
from mtp_train.checkpoints.run_export import RECIPE_FILE, is_run
from mtp_train.checkpoints.writing import LOCK_FILE, write_json, write_text
from mtp_train.errors import (
    CheckpointError,
    LostProcessError,
    OutputExistsError,
    RecipeError,
    StoppedError,
    printable,
    redacted,
)
from mtp_train.recipe.loading import dump_recipe, load_recipe, parse_yaml, recipe_from_mapping
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.head_source import RunHead
from mtp_train.trunk.precision import resolve_precision

FIRST_STAGE = "check"
OUTCOME_FILE, PROVENANCE_FILE = "outcome.json", "provenance.json"
FORMAT_VERSION = 1
"""Of a run directory: its records, states and responses."""
PROBE = "probe"
"""The directory of the probe that goes before a rescue."""
LEASE_SECONDS = 30.0
"""A lock of another machine is taken over after this time without a sign of life from its process."""
_PACKAGES = ("mtp-train", "torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy")


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``stage`` is ``done`` if every stage was completed."""

    exit_code: int
    reason: str
    message: str
    stage: str

    @property
    def finished(self) -> bool:
        """Whether a repeated call has nothing left to do."""
        return self.stage == "done"


def read_outcome(run_dir: Path) -> Outcome | None:
    """Return the recorded outcome; None if there is none, or none that can be read: the run then goes on.

    Fields of other releases are left out.
    """
    path = run_dir / OUTCOME_FILE
    try:
        found = read_json(path)
        exit_code, *texts = (found[field.name] for field in fields(Outcome))
    except (CheckpointError, KeyError):
        return None
    whole = type(exit_code) is int and all(isinstance(text, str) for text in texts)
    return Outcome(exit_code, *texts) if whole else None


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Write ``outcome.json``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / OUTCOME_FILE, outcome.__dict__)


def is_main_process() -> bool:
    """Return whether this is rank 0 of the launch, by the launcher's variable: valid before accelerate is set up."""
    return os.environ.get("RANK", "0") == "0"


def forget_outcome(run_dir: Path) -> None:
    """Remove the outcome of an earlier attempt. Only the main process does, as it holds the directory of all nodes."""
    if is_main_process():
        (run_dir / OUTCOME_FILE).unlink(missing_ok=True)


def record_failure(run_dir: Path, outcome: Outcome) -> Outcome | None:
    """Record how a process of a run failed.

    Rank 0's error replaces an earlier one, unless rank 0 failed or was stopped only because another rank died. Other
    ranks record an error only if there is none. Ranks are the launcher's: processes that are not connected would all
    count as the main process. An error in the first stage concerns all ranks, so its message names no rank.

    Returns:
        The earlier outcome that is kept instead; None if this outcome was recorded.
    """
    rank = int(os.environ.get("RANK", "0"))
    follows = outcome.reason in (LostProcessError.reason, StoppedError.reason)
    # A failure to write the outcome, such as a full disk, must not hide the error itself.
    with contextlib.suppress(OSError):
        if (rank or follows) and (said := read_outcome(run_dir)) is not None:
            return said
        alone = rank > 0 and not follows and outcome.stage != FIRST_STAGE
        named = replace(outcome, message=f"process {rank}: {outcome.message}") if alone else outcome
        write_outcome(run_dir, replace(named, message=printable(redacted(named.message))))
    return None


@contextlib.contextmanager
def held_by_one_run(run_dir: Path, console: Console) -> Iterator[None]:
    """Hold a run directory for this launch within the block: two runs would delete each other's files.

    The main process writes ``run.lock`` with its machine and process id, and removes it in the end. A lock whose
    process is gone is taken over: at once on this machine, after ``LEASE_SECONDS`` without a sign of life elsewhere.

    Raises:
        OutputExistsError: Another run holds the directory, or it was removed within the block.
    """
    if not is_main_process():
        yield
        return
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    # A second is enough to find that the process of a lock on this machine is gone.
    lock = SoftFileLease(path, lease_duration=LEASE_SECONDS, timeout=1.0, poll_interval=0.1)
    try:
        _acquire(lock, path, console)
        try:
            yield
            require_still_held(run_dir)
        finally:
            lock.release()
    finally:
        # A refused run leaves nothing behind.
        with contextlib.suppress(OSError):
            for directory in missing:
                directory.rmdir()


def require_still_held(run_dir: Path) -> None:
    """Check, on the main process, that nobody removed the run directory under its run.

    Raises:
        OutputExistsError: The directory or the lock in it is gone.
    """
    if is_main_process() and not (run_dir / LOCK_FILE).exists():
        raise OutputExistsError(
            f"run_dir: {run_dir} was removed, or {LOCK_FILE} in it, while this run wrote there; expected it to stay. "
            "What is there now is incomplete: remove it, and start the same command again."
        )


def _acquire(lock: SoftFileLease, path: Path, console: Console) -> None:
    try:
        lock.acquire()
        return
    except Timeout:
        host, pid = _holder(path)
    here = socket.gethostname()
    if host != here:
        console.print(f"{path}: process {pid} on {host} held it last; waiting for a sign of life.", highlight=False)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=2 * LEASE_SECONDS)
            return
    raise OutputExistsError(
        f"run_dir: {path.parent} is in use by process {pid} on {host}; expected one run in a directory. Wait for it or "
        "stop it, or choose another run_dir."
    )


def _holder(path: Path) -> tuple[str, str]:
    """Return the machine and the process id in a lock file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("host", "an unknown machine"), fields.get("pid", "of an unknown number")


def require_ours(run_dir: Path, recipe: Recipe) -> None:
    """Check that a run directory is new, or holds a run of the same resolved recipe.

    Raises:
        OutputExistsError: It holds the run of another recipe, or other files; it is the root, no directory, or lies
            within an input.
    """
    require_place(run_dir, recipe)
    entries = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    # Files of a refused run, and of a claim that was killed.
    claims = {OUTCOME_FILE, PROVENANCE_FILE, RECORD_FILE, LOCK_FILE}
    if entries <= {PROBE} | claims | {f".{name}.tmp" for name in (*claims, RECIPE_FILE)}:
        return
    recorded = run_dir / RECIPE_FILE
    if not recorded.is_file():
        raise OutputExistsError(
            f"run_dir: {run_dir} holds files that are not a run's ({', '.join(sorted(entries)[:3])}); expected a new "
            "or empty directory. Choose another run_dir."
        )
    found = read_json(run_dir / PROVENANCE_FILE).get("format_version")
    if found != FORMAT_VERSION:
        raise OutputExistsError(
            f"run_dir: {run_dir} holds a run of format_version {found!r}, which another version of mtp-train began; "
            f"expected {FORMAT_VERSION}. Choose another run_dir, or remove this one."
        )
    if not _is_recipe_of(recorded.read_text(encoding="utf-8"), recipe):
        raise OutputExistsError(
            f"run_dir: {run_dir} holds the run of another recipe ({recorded}); expected the same resolved recipe to "
            "resume. Choose another run_dir, or remove this one."
        )


def require_place(run_dir: Path, recipe: Recipe) -> None:
    """Refuse the root, a path below a file, and directories within an input: a run would change that input.

    ``check`` and ``run`` both call it. ``check`` accepts the directory of another recipe, to compare its overrides.

    Raises:
        OutputExistsError: The run directory is in such a place.
    """
    place = run_dir.resolve()
    if place == Path(place.anchor):
        raise OutputExistsError(f"run_dir: {run_dir} is the root; expected a new directory. Choose another run_dir.")
    if run_dir.exists() and not run_dir.is_dir():
        raise OutputExistsError(f"run_dir: {run_dir} is a file; expected a directory. Choose another run_dir.")
    above = next(one for one in place.parents if one.exists())
    if not above.is_dir():
        raise OutputExistsError(
            f"run_dir: {run_dir} lies below the file {above}; expected a new directory. Choose another run_dir."
        )
    model = recipe.model
    inputs = {"model.trunk": model.trunk, "model.head_from": model.head_from, "model.adapter": model.adapter}
    inputs["data.responses"] = recipe.data.responses
    inputs |= {f"data.sources.{number}": source.path for number, source in enumerate(recipe.data.sources)}
    for field, name in inputs.items():
        location = None if name is None else Path(resolve(name)).resolve()
        if location is not None and location.is_dir() and place.is_relative_to(location):
            raise OutputExistsError(
                f"run_dir: {run_dir} lies within {field} ({name}); expected a directory outside of the inputs. Choose "
                "another run_dir."
            )


def _is_recipe_of(recorded: str, recipe: Recipe) -> bool:
    """Return whether a recorded recipe equals this one.

    The address of a server is not compared, as what it serves is checked again, nor the number of
    processes.
    """
    if recorded == dump_recipe(recipe):
        return True
    with contextlib.suppress(RecipeError):
        before = recipe_from_mapping(parse_yaml(recorded, "recipe")[0])
        return dump_recipe(before) == dump_recipe(_on_machines_of(before, recipe))
    return False


def _on_machines_of(before: Recipe, now: Recipe) -> Recipe:
    """Return a recipe with another one's processes, and its server's address, key and limits where both have one."""
    regenerate, earlier = now.data.regenerate, before.data.regenerate
    if regenerate is not None and earlier is not None and None not in (regenerate.endpoint, earlier.endpoint):
        names = ("endpoint", "api_key_env", "concurrency", "request_timeout_seconds")
        regenerate = replace(regenerate, **{name: getattr(earlier, name) for name in names})
    train = replace(now.train, processes=before.train.processes)
    return replace(now, data=replace(now.data, regenerate=regenerate), train=train)


def claim(run_dir: Path, recipe: Recipe, provenance: dict[str, Any]) -> None:
    """Claim the run directory: record the recipe and the provenance."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not is_run(run_dir):
        write_json(run_dir / PROVENANCE_FILE, {"format_version": FORMAT_VERSION, **provenance})
        write_text(run_dir / RECIPE_FILE, dump_recipe(recipe))


def record_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Replace the recorded recipe by one whose last fields are resolved."""
    write_text(run_dir / RECIPE_FILE, dump_recipe(recipe))


def checkpoint_identity(name: str, checkpoint: Checkpoint | RunHead) -> dict[str, Any]:
    """Return a checkpoint's or head's path, its hub revision if it has one, and the hashes of its small files."""
    path = checkpoint.path.resolve()
    files = [checkpoint.path / file for file in (CONFIG_FILE, INDEX_FILE, HEAD_CONFIG_FILE)]
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
        "argv": [redacted(word) for word in sys.argv],
        "git": _git_commit(),
        "hardware": {"device": device, "threads": torch.get_num_threads(), "platform": platform.platform()},
    }


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        # Slim container images have no git.
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
    """Remove temporary files of writes that a kill interrupted."""
    for pattern in _LEFTOVERS:
        for path in run_dir.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def with_recorded_precision(recipe: Recipe, run_dir: Path) -> Recipe:
    """Return a recipe with ``precision: auto`` replaced by the precision that its run directory records.

    A run that resumes on another machine keeps its precision: steps in another one would give another head.
    """
    recorded = recorded_recipe(run_dir)
    if recipe.train.precision != "auto" or recorded is None:
        return recipe
    return replace(recipe, train=replace(recipe.train, precision=recorded.train.precision))


def recorded_recipe(run_dir: Path) -> Recipe | None:
    """Return the resolved recipe of a run directory; None where there is none, or one of another version.

    ``require_ours`` refuses the latter with a message.
    """
    try:
        return load_recipe(run_dir / RECIPE_FILE) if is_run(run_dir) else None
    except RecipeError:
        return None


def with_resolved_precision(recipe: Recipe, device: torch.device) -> Recipe:
    """Return a recipe with ``precision: auto`` resolved for a device."""
    precision = resolve_precision(recipe.train.precision, device).precision
    return replace(recipe, train=replace(recipe.train, precision=precision))


def tell_precision(recipe: Recipe, device: torch.device, console: Console) -> None:
    """Print the precision of a resolved recipe, and how the device computes it."""
    precision, reason = resolve_precision(recipe.train.precision, device)
    console.print(f"training in {precision}: {reason}", highlight=False)
