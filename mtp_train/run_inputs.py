"""The inputs of a run or a study: which files they are, and whether they are still those that it was begun with."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train.data.sources import local_files
from mtp_train.demo import resolve
from mtp_train.errors import ChangedInputError, DataError, MtpError
from mtp_train.inputs import open_location
from mtp_train.recipe import Recipe
from mtp_train.run_dir import PROVENANCE_FILE, RECIPE_FILE
from mtp_train.study.suites import suite_location
from mtp_train.weights.files import locate_checkpoint, read_json
from mtp_train.weights.identity import (
    RECORD_FILE,
    Contents,
    InputFiles,
    InputRecord,
    Records,
    changed_files,
    checkpoint_files,
    directory_files,
    hash_inputs,
    read_records,
    stored_bytes,
    write_records,
    written_since,
)

TRUNK, HEAD_FROM, ADAPTER = "model.trunk", "model.head_from", "model.adapter"
Loaders = Mapping[str, Callable[[], InputFiles]]
"""By what an input is for, how its files are found; raises a MtpError where they are not there."""


@dataclass(frozen=True)
class Claimed:
    """A directory that holds results, and how messages speak of it."""

    directory: Path
    marker: str
    """Its file that was written when it was begun, and never again."""
    noun: str
    cure: str
    """The way on with the new inputs."""
    earlier: Mapping[str, Mapping[str, Any]]
    """Path and hashes of checkpoints, as versions without a record of all inputs kept them."""

    @classmethod
    def by_run(cls, run_dir: Path) -> Claimed:
        """Describe a run directory."""
        path = run_dir / PROVENANCE_FILE
        kept = read_json(path) if path.is_file() else {}
        earlier = {TRUNK: kept.get("trunk"), HEAD_FROM: kept.get("head_from")}
        cure = "write another run_dir for the new ones"
        return cls(run_dir, RECIPE_FILE, "run", cure, {label: one for label, one in earlier.items() if one})


def run_loaders(recipe: Recipe, places: Mapping[str, str], *, anew: bool) -> Loaders:
    """Return the inputs of a recipe.

    Args:
        recipe: The recipe. Datasets of the hub are not among its inputs here: nothing of them is at hand to compare.
        places: Where inputs were found before.
        anew: Whether a hub id stands for what the hub has now, as for a run that starts. If not, it stands for the
            snapshot that was used, and nothing is downloaded.
    """
    model, study = recipe.model, recipe.study

    def located(label: str, location: str) -> str:
        known = places.get(label)
        is_here = Path(resolve(location)).expanduser().exists()
        return location if anew or known is None or is_here or not Path(known).exists() else known

    def checkpoint(label: str, location: str) -> InputFiles:
        return checkpoint_files(open_location(located(label, location)))

    def adapter(label: str, location: str) -> InputFiles:
        return directory_files(locate_checkpoint(located(label, location)))

    loaders: dict[str, Callable[[], InputFiles]] = {TRUNK: partial(checkpoint, TRUNK, model.trunk)}
    if model.head_from:
        loaders[HEAD_FROM] = partial(checkpoint, HEAD_FROM, model.head_from)
    if model.adapter:
        loaders[ADAPTER] = partial(adapter, ADAPTER, model.adapter)
    data = {f"data.sources.{number}": source.path for number, source in enumerate(recipe.data.sources)}
    if study is not None:
        data |= {f"study.vanilla_sources.{number}": path for number, path in enumerate(study.vanilla_sources)}
        if study.suite is not None and (place := suite_location(study.suite)) is not None:
            data["study.suite"] = place
        for name in study.drift.checkpoints if study.drift is not None else ():
            label = f"study.drift.checkpoints ({name})"
            loaders[label] = partial(checkpoint, label, name)
    local = {label: path for label, path in data.items() if label in places or is_local(label, path)}
    return loaders | {label: partial(data_files, label, path) for label, path in local.items()}


def is_local(label: str, path: str) -> bool:
    """Whether a source of data is not a dataset of the hub; so also where its files are gone."""
    try:
        return local_files(resolve(path), label) is not None
    except MtpError:
        return True


def data_files(label: str, path: str) -> InputFiles:
    """Return the files of a local source of data.

    Raises:
        DataError: There is none.
    """
    location = Path(resolve(path)).expanduser()
    files = local_files(str(location), label)
    if files is None:
        raise DataError(f"{label}: no such file or directory ({location}); expected the data. Check the path.")
    if location.is_dir():
        return InputFiles(location, {str(file.relative_to(location)): file for file in files})
    if location.exists():
        return InputFiles(location, {location.name: location})
    return InputFiles(files[0].parent, {str(file): file for file in files})


def input_bytes(recipe: Recipe) -> int:
    """Return the size of the inputs that identify a run, so far as they are on this machine. Opens none."""
    model = recipe.model
    named = [Path(resolve(name)).expanduser() for name in (model.head_from, model.adapter) if name]
    total = sum(stored_bytes(path) for path in (locate_checkpoint(resolve(model.trunk)), *named))
    for source in recipe.data.sources:
        # What is not there is refused when it is read.
        with contextlib.suppress(MtpError):
            files = local_files(resolve(source.path), source.path) or []
            total += sum(file.stat().st_size for file in files)
    return total


def loaded(loaders: Loaders) -> dict[str, InputFiles]:
    """Find the files of all inputs.

    Raises:
        MtpError: An input is not there.
    """
    return {label: load() for label, load in loaders.items()}


def require_same(
    claimed: Claimed, loaders: Loaders, progress: Progress, *, finished: bool = False, keeps: bool = True
) -> None:
    """Check that inputs are those that a directory's results were begun with.

    Inputs that were touched, copied or moved, and whose content is the same, pass; so do those of a directory that an
    earlier version began, where all of their files are older than that.

    Args:
        claimed: The directory.
        loaders: Its inputs as they are now.
        progress: Shows the hashing of files whose status changed.
        finished: Whether nothing is left to do there.
        keeps: Whether to record the new status of files that were hashed again, where the directory can be written to.

    Raises:
        ChangedInputError: An input changed, is gone, or cannot be shown to be the same.
    """
    recorded = read_records(claimed.directory)
    found: dict[str, InputFiles] = {}
    changed, unproven = [], []
    for label, load in loaders.items():
        try:
            found[label] = load()
        except MtpError as error:
            changed.append(f"{label} cannot be opened ({error})")
    records = hash_inputs({label: one for label, one in found.items() if label in recorded}, recorded, progress)
    for label, record in records.items():
        names = changed_files(recorded[label].contents, record.contents)
        changed += [_named(label, record.location, names)] if names else []
    for label in [label for label in found if label not in recorded]:
        one = found[label]
        if recorded:
            changed.append(f"{label} ({one.location}) was none of them")
            continue
        names = _unproven_files(claimed, one, claimed.earlier.get(label, {}))
        unproven += [_named(label, str(one.location), names)] if names else []
    _refuse(claimed, changed, unproven, finished)
    if keeps and recorded != (updated := {**recorded, **records}):
        with contextlib.suppress(OSError):
            write_records(claimed.directory, updated)


def _named(label: str, location: str, names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{label} ({location}): {', '.join(names[:5])}{more}"


def _refuse(claimed: Claimed, changed: list[str], unproven: list[str], finished: bool) -> None:
    where, noun = claimed.directory, claimed.noun
    keeps = f" What {where} holds is whole, and made with the old ones." if finished else ""
    if changed:
        raise ChangedInputError(
            f"{where}: inputs changed since the {noun} began: {'; '.join(changed)}; expected the files that it began "
            f"with. Put the old ones back, or {claimed.cure}.{keeps}"
        )
    if unproven:
        raise ChangedInputError(
            f"{where}: begun by a version that kept no {RECORD_FILE}, and files were written or moved since, so that "
            f"nothing shows them to be those that the {noun} began with: {'; '.join(unproven)}; expected files "
            f"older than {claimed.marker}. If they are the old ones by their content, nothing here can tell: "
            f"{claimed.cure}.{keeps}"
        )


def _unproven_files(claimed: Claimed, one: InputFiles, earlier: Mapping[str, Any]) -> list[str]:
    """Name the files that cannot be shown to be those of the beginning."""
    moment_ns = (claimed.directory / claimed.marker).stat().st_mtime_ns
    hashes = earlier.get("sha256", {})
    same = {name for name in hashes if name in one.files and hashes[name] == _sha256(one.files[name])}
    names = [name for name in written_since(one, moment_ns) if name not in same]
    if earlier and earlier["path"] != str(one.location.resolve()):
        names.append(f"all, as it was {earlier['path']}")
    return names


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def require_run_inputs(
    recipe: Recipe, run_dir: Path, progress: Progress, *, anew: bool = False, finished: bool = False
) -> None:
    """Check that the inputs of a run are those that it was begun with. A run directory that is not claimed yet passes.

    Args:
        recipe: The run's.
        run_dir: Its directory.
        progress: Where to show progress.
        anew: Whether hub ids stand for what the hub has now, as for a run that starts; if not, for what was used.
        finished: Whether nothing is left to do in the run.

    Raises:
        ChangedInputError: An input changed, is gone, or cannot be shown to be the same.
    """
    if not (run_dir / RECIPE_FILE).is_file():
        return
    claimed = Claimed.by_run(run_dir)
    places = {label: one["path"] for label, one in claimed.earlier.items()}
    places |= {label: one.location for label, one in read_records(run_dir).items()}
    require_same(claimed, run_loaders(recipe, places, anew=anew), progress, finished=finished)


def hash_run_inputs(recipe: Recipe, run_dir: Path, progress: Progress) -> dict[str, InputRecord]:
    """Return the content of a run's inputs; what the run directory vouches for is not read again."""
    return hash_inputs(loaded(run_loaders(recipe, {}, anew=True)), read_records(run_dir), progress)


def record_run_inputs(run_dir: Path, records: Records) -> None:
    """Record inputs in a run directory before it is claimed, or that an earlier version claimed without them."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / RECIPE_FILE).is_file() or not (run_dir / RECORD_FILE).is_file():
        write_records(run_dir, records)


def run_contents(run_dir: Path) -> dict[str, Contents]:
    """Return the recorded content of a run's inputs, for all that is kept by it."""
    return {label: one.contents for label, one in read_records(run_dir).items()}
