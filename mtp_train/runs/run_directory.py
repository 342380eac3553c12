"""The directory of a run: whose it is, which process writes to it, its recorded inputs, and how its last attempt ended.

A claimed directory has ``recipe.yaml`` (the resolved recipe), ``provenance.json`` and ``inputs.json``.
``outcome.json`` is how the last attempt ended. ``run.lock`` names the process that writes to it.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import SoftFileLease, Timeout
from rich.console import Console
from rich.progress import Progress

from mtp_train import __version__
from mtp_train.checkpoints.artifact import HEAD_CONFIG_FILE
from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import CONFIG_FILE, INDEX_FILE, Checkpoint, JsonObject, read_json
from mtp_train.checkpoints.identity import (
    RECORD_FILE,
    Contents,
    InputFiles,
    InputRecord,
    Records,
    checkpoint_files,
    directory_files,
    hash_inputs,
    read_records,
    require_same,
    write_records,
)
from mtp_train.checkpoints.locations import RECIPE_FILE, is_run, locate_checkpoint, open_location
from mtp_train.checkpoints.writing import LOCK_FILE, full_disk_is_named, write_json, write_text
from mtp_train.data.sources import local_files
from mtp_train.errors import (
    CheckpointError,
    DataError,
    LostProcessError,
    MtpError,
    OutputExistsError,
    RecipeError,
    StoppedError,
    printable,
    redacted,
)
from mtp_train.evaluation.results import read_record
from mtp_train.progress import is_main_process
from mtp_train.recipe.json_schema import dotted, shown
from mtp_train.recipe.loading import dump_recipe, load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.inputs import LoneHead, open_head_source
from mtp_train.train.machine import device_name
from mtp_train.train.stopping import Stopped

FIRST_STAGE, DONE = "check", "done"
OUTCOME_FILE, PROVENANCE_FILE = "outcome.json", "provenance.json"
FORMAT_VERSION = 1
"""Of a run directory: its records, states and responses."""
PROBE = "probe"
"""The directory of the probe that goes before a rescue."""
LEASE_SECONDS = 30.0
"""A lock of another machine is taken over after this time without a sign of life from its process."""
TRUNK, HEAD_FROM, ADAPTER = "model.trunk", "model.head_from", "model.adapter"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy")
_OF_THE_MACHINES = ("train.processes", "track.", "data.regenerate.api_key_env", "data.regenerate.concurrency")
_LEFTOVERS = (".head.*", ".export.*", ".*.tmp", "figures/.*.tmp", "state/.step-*", "hidden/*/*.partial")


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
        return self.stage == DONE


@dataclass
class Attempt:
    """How far one attempt to run a recipe has come."""

    stage: str = FIRST_STAGE


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run. Processes of a launch share it; the main process writes its records."""

    path: Path

    @property
    def recipe(self) -> Recipe | None:
        """The recorded recipe; None where there is none, or one of another version, which ``require_ours`` refuses."""
        try:
            return load_recipe(self.path / RECIPE_FILE) if is_run(self.path) else None
        except RecipeError:
            return None

    @property
    def provenance(self) -> JsonObject:
        return read_json(self.path / PROVENANCE_FILE)

    @property
    def outcome(self) -> Outcome | None:
        """The recorded outcome, without fields of other releases; None if there is none that can be read."""
        try:
            return read_record(Outcome, read_json(self.path / OUTCOME_FILE), OUTCOME_FILE)
        except (CheckpointError, DataError):
            return None

    @property
    def contents(self) -> dict[str, Contents]:
        """The recorded content hashes of the inputs, which caches and responses are keyed by."""
        return {label: one.contents for label, one in read_records(self.path).items()}

    # Whose it is

    def require_ours(self, recipe: Recipe) -> None:
        """Check that the directory is new, or holds a run of the same resolved recipe."""
        self.require_place(recipe)
        if not is_run(self.path):
            return
        found = self.provenance.get("format_version")
        if found != FORMAT_VERSION:
            which = f"holds a run of format_version {found!r}, which another version of mtp-train began"
            raise self._refused(which, str(FORMAT_VERSION), ", or remove this one")
        recorded = self.path / RECIPE_FILE
        differing = _differing_fields(recorded, recipe)
        if differing:
            more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
            other = f"holds the run of another recipe ({recorded}): {', '.join(differing[:3])}{more}"
            raise self._refused(other, "the same resolved recipe to resume", ", or remove this one")

    def require_place(self, recipe: Recipe) -> None:
        """Refuse a path on or below a file, directories within an input, and those with files that are not a run's.

        ``check`` calls this alone: it accepts the directory of another recipe, to compare its overrides.
        """
        place = self.path.resolve()
        above = next(one for one in (place, *place.parents) if one.exists())
        if not above.is_dir():
            raise self._refused(f"is or lies below the file {above}", "a directory")
        model = recipe.model
        inputs = {
            TRUNK: model.trunk,
            HEAD_FROM: model.head_from,
            ADAPTER: model.adapter,
            "data.responses": recipe.data.responses,
        }
        inputs |= {f"data.sources.{number}": source.path for number, source in enumerate(recipe.data.sources)}
        for field, name in inputs.items():
            if name is None:
                continue
            location = Path(resolve(name)).resolve()
            if location.is_dir() and place.is_relative_to(location):
                raise self._refused(f"lies within {field} ({name})", "a directory outside of the inputs")
        entries = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        # Files of a refused run, and of a claim that was killed.
        claims = {OUTCOME_FILE, PROVENANCE_FILE, RECORD_FILE, LOCK_FILE}
        left = entries - {PROBE} - claims - {f".{name}.tmp" for name in (*claims, RECIPE_FILE)}
        if left and not is_run(self.path):
            others = ", ".join(sorted(left)[:3])
            raise self._refused(f"holds files that are not a run's ({others})", "a new or empty directory")

    def _refused(self, found: str, expected: str, instead: str = "") -> OutputExistsError:
        return OutputExistsError(f"run_dir: {self.path} {found}; expected {expected}. Choose another run_dir{instead}.")

    # The lock

    @contextlib.contextmanager
    def held(self, console: Console, what: str = "the run") -> Iterator[None]:
        """Hold the directory for this launch within the block: two runs would delete each other's files.

        The main process writes ``run.lock``, and removes it in the end. A lock of this machine whose process is gone is
        taken over at once.
        """
        with (
            full_disk_is_named(self.path, what=what),
            self._locked(console) if is_main_process() else contextlib.nullcontext(),
        ):
            yield

    @contextlib.contextmanager
    def _locked(self, console: Console) -> Iterator[None]:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        # A second is enough to find that the process of a lock on this machine is gone.
        lock = SoftFileLease(self.path / LOCK_FILE, lease_duration=LEASE_SECONDS, timeout=1.0, poll_interval=0.1)
        try:
            _acquire(lock, self.path / LOCK_FILE, console)
            try:
                yield
                self._require_held()
            finally:
                lock.release()
        finally:
            # A refused run leaves nothing behind.
            with contextlib.suppress(OSError):
                for directory in missing:
                    directory.rmdir()

    def _require_held(self) -> None:
        if is_main_process() and not (self.path / LOCK_FILE).exists():
            raise OutputExistsError(
                f"run_dir: {self.path} was removed, or {LOCK_FILE} in it, while this run wrote there; expected it to "
                "stay. What is there now is incomplete: remove it, and start the same command again."
            )

    # How the last attempt ended

    @contextlib.contextmanager
    def recording(self) -> Iterator[Attempt]:
        """Record how an attempt fails, in ``outcome.json``, on every way out of the block but its end."""
        attempt = Attempt()
        # The main process holds the directory of all nodes.
        if is_main_process():
            (self.path / OUTCOME_FILE).unlink(missing_ok=True)
        try:
            yield attempt
        except MtpError as error:
            self._require_held()
            # A process that never joined the others may belong to a launch that was refused the directory.
            joined = is_main_process() or torch.distributed.is_initialized()
            unjoined = isinstance(error, LostProcessError) and not joined
            if not (isinstance(error, OutputExistsError) or unjoined):
                earlier = self.record_failure(Outcome(error.exit_code, error.reason, str(error), attempt.stage))
                if earlier is not None and isinstance(error, LostProcessError):
                    raise LostProcessError(
                        f"launcher: another process of this run is gone. {earlier.message}"
                    ) from error
            raise
        except Stopped as stopped:
            told = StoppedError(
                f"{self.path}: stopped by {stopped} in the stage {attempt.stage!r}.\n"
                "Start the same command again: it goes on from what that stage has saved.",
                stopped.exit_code,
            )
            if is_main_process() or attempt.stage != FIRST_STAGE:
                self.record_failure(Outcome(told.exit_code, told.reason, str(told), attempt.stage))
            raise told from None
        except Exception as error:
            self._require_held()
            self.record_failure(Outcome(1, "bug", f"{type(error).__name__}: {error}", attempt.stage))
            raise

    def write_outcome(self, outcome: Outcome) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / OUTCOME_FILE, outcome.__dict__)

    def record_failure(self, outcome: Outcome) -> Outcome | None:
        """Record how a process of a run failed; return an earlier outcome that is kept instead.

        Rank 0's error replaces an earlier one, unless rank 0 failed or was stopped only because another rank died.
        Other ranks record an error only if there is none. Ranks are the launcher's: processes that are not connected
        would all count as the main process. An error in the first stage concerns all ranks, so its message names no
        rank.
        """
        rank = int(os.environ.get("RANK", "0"))
        follows = outcome.reason in (LostProcessError.reason, StoppedError.reason)
        # A failure to write the outcome, such as a full disk, must not hide the error itself.
        with contextlib.suppress(OSError):
            if (rank or follows) and (earlier := self.outcome) is not None:
                return earlier
            alone = rank > 0 and not follows and outcome.stage != FIRST_STAGE
            named = f"process {rank}: {outcome.message}" if alone else outcome.message
            self.write_outcome(replace(outcome, message=printable(redacted(named))))
        return None

    # Records

    def claim(self, recipe: Recipe, provenance: Mapping[str, Any], records: Records) -> None:
        """Record inputs, provenance and recipe, unless a run has begun here. The recipe comes last: it is the claim."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not is_run(self.path):
            write_records(self.path, records)
            write_json(self.path / PROVENANCE_FILE, {"format_version": FORMAT_VERSION, **provenance})
            self.record_recipe(recipe)

    def record_recipe(self, recipe: Recipe) -> None:
        """Write the recipe, or replace it by one whose last fields are resolved."""
        write_text(self.path / RECIPE_FILE, dump_recipe(recipe))

    def with_precision(self, recipe: Recipe, automatic: Literal["fp32", "bf16"]) -> Recipe:
        """Return a recipe with ``precision: auto`` replaced by the recorded precision, without one by ``automatic``.

        A run that resumes on another machine keeps its precision: steps in another one would give another head.
        """
        if recipe.train.precision != "auto":
            return recipe
        recorded = self.recipe
        return recipe.replaced({"train.precision": automatic if recorded is None else recorded.train.precision})

    def clear_leftovers(self) -> None:
        for pattern in _LEFTOVERS:
            for path in self.path.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def hash_inputs(self, recipe: Recipe, progress: Progress) -> dict[str, InputRecord]:
        """Return the content hashes of the recipe's inputs. Files with a valid record here are not read."""
        return hash_inputs(_inputs(recipe, {}, anew=True), read_records(self.path), progress)

    def require_same_inputs(
        self, recipe: Recipe, progress: Progress, *, anew: bool = False, finished: bool = False
    ) -> None:
        """Check that the inputs have not changed since the run began. A directory that is not claimed yet passes.

        Hub ids stand for the hub's current revision with ``anew``, as for a new run; else for the snapshot in use.
        """
        if is_run(self.path):
            places = {label: one.location for label, one in read_records(self.path).items()}
            require_same(self.path, _inputs(recipe, places, anew=anew), progress, finished=finished)


def _acquire(lock: SoftFileLease, path: Path, console: Console) -> None:
    try:
        lock.acquire()
        return
    except Timeout:
        owner = lock.owner
    holder = "an unknown process" if owner is None else f"process {owner.pid} on {owner.hostname}"
    if owner is None or owner.hostname != socket.gethostname():
        console.print(f"{path}: {holder} held it last; waiting for a sign of life.")
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=2 * LEASE_SECONDS)
            return
    raise OutputExistsError(
        f"run_dir: {path.parent} is in use by {holder}; expected one run in a directory. Wait for it or stop it, or "
        "choose another run_dir."
    )


_ADDRESSES = ("data.regenerate.endpoint", "train.states.endpoint")


def _differing_fields(recorded: Path, recipe: Recipe) -> list[str]:
    """Return the fields of a recorded recipe that differ from this one, each with both values.

    Not compared: the address of a server, as what it serves is checked again, the number of processes, a precision that
    is ``auto``, and trackers.
    """
    try:
        before = load_recipe(recorded)
    except RecipeError as error:
        return [f"it is not valid here ({error.problems[0]})"]
    found = _differences(before.model_dump(mode="json"), recipe.model_dump(mode="json"), "")
    return [
        f"{path}: {shown(there)} there, {shown(here)} here"
        for path, there, here in found
        if not (
            path.startswith(_OF_THE_MACHINES)
            or (path == "train.precision" and here == "auto")
            or (path in _ADDRESSES and None not in (there, here))
        )
    ]


def _differences(there: Any, here: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    match there, here:
        case dict(), dict():
            for name in there | here:
                yield from _differences(there.get(name), here.get(name), dotted(path, name))
        case [dict(), *_], [dict(), *_] if len(there) == len(here):
            for number, (one, other) in enumerate(zip(there, here, strict=True)):
                yield from _differences(one, other, dotted(path, number))
        case _ if there != here:
            yield path, there, here


def _inputs(recipe: Recipe, places: Mapping[str, str], *, anew: bool) -> dict[str, InputFiles]:
    """Return the files of each input of a recipe.

    Datasets of the hub are left out: their files are not at hand to compare. Unless ``anew``, a hub id stands for the
    snapshot in ``places``, the recorded locations, and nothing is downloaded.
    """
    model = recipe.model

    def located(label: str, location: str) -> str:
        known = places.get(label)
        is_here = Path(resolve(location)).expanduser().exists()
        return location if anew or known is None or is_here or not Path(known).exists() else known

    inputs = {TRUNK: checkpoint_files(open_location(located(TRUNK, model.trunk)))}
    if model.head_from:
        source = open_head_source(located(HEAD_FROM, model.head_from))
        inputs[HEAD_FROM] = checkpoint_files(source) if isinstance(source, Checkpoint) else directory_files(source.path)
    if model.adapter:
        inputs[ADAPTER] = directory_files(locate_checkpoint(located(ADAPTER, model.adapter)))
    for number, data in enumerate(recipe.data.sources):
        label = f"data.sources.{number}"
        files = _data_files(label, data.path)
        if files is not None:
            inputs[label] = files
        elif label in places:
            # A directory that is gone reads like the id of a dataset.
            raise DataError(f"{label}: no such file or directory ({data.path}); expected the data. Check the path.")
    return inputs


def _data_files(label: str, path: str) -> InputFiles | None:
    """Return the files of a data source; None for a dataset of the hub."""
    location = Path(resolve(path)).expanduser()
    files = local_files(resolve(path), label)
    if files is None:
        return None
    if not location.exists():
        return InputFiles(files[0].parent, {str(file): file for file in files})
    base = location if location.is_dir() else location.parent
    return InputFiles(location, {str(file.relative_to(base)): file for file in files})


def checkpoint_identity(name: str, checkpoint: Checkpoint | LoneHead) -> JsonObject:
    """Return a checkpoint's or head's path, its hub revision if it has one, and the hashes of its small files."""
    path = checkpoint.path.resolve()
    files = [checkpoint.path / file for file in (CONFIG_FILE, INDEX_FILE, HEAD_CONFIG_FILE)]
    return {
        "name": name,
        "path": str(path),
        "revision": path.name if path.parent.name == "snapshots" else None,
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()},
    }


def environment_facts() -> JsonObject:
    return {
        "versions": {"mtp-train": __version__, **{package: metadata.version(package) for package in _PACKAGES}},
        "python": platform.python_version(),
        "argv": [redacted(word) for word in sys.argv],
        "git": _git_commit(),
        "hardware": {
            "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
        },
    }


def _git_commit() -> str | None:
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        # Slim container images have no git.
        return None
    return commit.stdout.strip() or None
