"""Record the content of a run's inputs, and check on resume that no input has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rich.progress import Progress

from mtp_train.checkpoints.demo import resolve
from mtp_train.checkpoints.files import Checkpoint, locate_checkpoint
from mtp_train.checkpoints.identity import (
    Claimed,
    Contents,
    InputFiles,
    InputRecord,
    Loaders,
    Records,
    checkpoint_files,
    directory_files,
    hash_inputs,
    loaded,
    read_records,
    require_same,
    write_records,
)
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.run_export import is_run
from mtp_train.data.sources import local_files
from mtp_train.errors import DataError, MtpError
from mtp_train.evaluation.suites import suite_location
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.head_source import open_head_source
from mtp_train.runs.run_answers import require_same_trunk

TRUNK, HEAD_FROM, ADAPTER = "model.trunk", "model.head_from", "model.adapter"


def claimed_by_run(run_dir: Path) -> Claimed:
    """Describe a run directory."""
    return Claimed(run_dir, "run", "write another run_dir for the new ones")


def run_loaders(recipe: Recipe, places: Mapping[str, str], *, anew: bool) -> Loaders:
    """Return functions that locate the files of each input of a recipe.

    Args:
        recipe: The recipe. Datasets of the hub are not recorded: their files are not at hand to compare.
        places: The recorded location of each input.
        anew: Whether a hub id stands for the hub's current revision, as for a new run. If not, it stands for the
            snapshot that was used, and nothing is downloaded.
    """
    model, study = recipe.model, recipe.study

    def located(label: str, location: str) -> str:
        known = places.get(label)
        is_here = Path(resolve(location)).expanduser().exists()
        return location if anew or known is None or is_here or not Path(known).exists() else known

    def checkpoint(label: str, location: str) -> InputFiles:
        return checkpoint_files(open_location(located(label, location)))

    def head_source(label: str, location: str) -> InputFiles:
        source = open_head_source(located(label, location))
        return checkpoint_files(source) if isinstance(source, Checkpoint) else directory_files(source.path)

    def adapter(label: str, location: str) -> InputFiles:
        return directory_files(locate_checkpoint(located(label, location)))

    loaders: dict[str, Callable[[], InputFiles]] = {TRUNK: partial(checkpoint, TRUNK, model.trunk)}
    if model.head_from:
        loaders[HEAD_FROM] = partial(head_source, HEAD_FROM, model.head_from)
    if model.adapter:
        loaders[ADAPTER] = partial(adapter, ADAPTER, model.adapter)
    data = {f"data.sources.{number}": source.path for number, source in enumerate(recipe.data.sources)}
    if study is not None:
        data |= {f"study.vanilla_sources.{number}": path for number, path in enumerate(study.vanilla_sources)}
        if study.suite is not None and (place := suite_location(study.suite)) is not None:
            data["study.suite"] = place
    local = {label: path for label, path in data.items() if label in places or is_local(label, path)}
    return loaders | {label: partial(data_files, label, path) for label, path in local.items()}


def is_local(label: str, path: str) -> bool:
    """Return whether a data source is local and no dataset of the hub, also if its files no longer exist."""
    try:
        return local_files(resolve(path), label) is not None
    except MtpError:
        return True


def data_files(label: str, path: str) -> InputFiles:
    """Return the files of a local data source.

    Raises:
        DataError: There are no such files.
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


def require_run_inputs(
    recipe: Recipe, run_dir: Path, progress: Progress, *, anew: bool = False, finished: bool = False
) -> None:
    """Check that the inputs of a run have not changed since it began. A run directory that is not claimed yet passes.

    Args:
        recipe: The run's recipe.
        run_dir: The run directory.
        progress: Shows the progress of hashing.
        anew: Whether hub ids stand for the hub's current revision, as for a new run; if not, for the snapshot in use.
        finished: Whether the run is finished.

    Raises:
        ChangedInputError: An input changed, is missing, or cannot be shown to be the same.
    """
    if not is_run(run_dir):
        return
    claimed = claimed_by_run(run_dir)
    places = {label: one.location for label, one in read_records(run_dir).items()}
    require_same(claimed, run_loaders(recipe, places, anew=anew), progress, finished=finished)


def hash_run_inputs(recipe: Recipe, run_dir: Path, progress: Progress) -> dict[str, InputRecord]:
    """Return the content hashes of a run's inputs. Files with a valid record in the run directory are not read.

    Raises:
        MtpError: An input is missing, or the responses of ``data.responses`` are another trunk's.
    """
    records = hash_inputs(loaded(run_loaders(recipe, {}, anew=True)), read_records(run_dir), progress)
    adapter = records[ADAPTER].contents if ADAPTER in records else None
    require_same_trunk(recipe, run_dir, records[TRUNK].contents, adapter)
    return records


def record_run_inputs(run_dir: Path, records: Records) -> None:
    """Record inputs in a run directory, before it is claimed."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not is_run(run_dir):
        write_records(run_dir, records)


def run_contents(run_dir: Path) -> dict[str, Contents]:
    """Return the recorded content hashes of a run's inputs, which caches and responses are keyed by."""
    return {label: one.contents for label, one in read_records(run_dir).items()}
