"""Identify inputs by the content of their files, and check that a directory's results belong to the same inputs.

:func:`hash_inputs` returns a record of each input, with the SHA-256 of every file that a result depends on, and
:func:`write_records` keeps it in ``inputs.json``. :func:`require_same` compares the inputs of a run or study with that
record, before its directory is used again.

A record also keeps each file's size, times, inode and device (its status). A file with the recorded status is not read
again. A file that was touched, copied, restored or moved to another disk or machine has another status: it is hashed
again, and its content decides.

The status counts only where it can show a change:

- Times advance in ticks. A file that was hashed within ``TICK_NS`` of its last change could be rewritten at the same
  size in the same tick and keep its status, so it is hashed again next time.
- A program can set the modification time (``cp -p``, ``os.utime``), so the change time (ctime), which it cannot set,
  must be the same as well. A new hard link to a file changes the ctime too; the price is one more hash.
- The name of a blob in the hub's cache is the SHA-256 that the server announced. It is not used instead of a hash: the
  hub client checks only the size of a download, and a program that writes through the link keeps the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from rich.progress import Progress

from mtp_train.checkpoints.files import INDEX_FILE, Checkpoint, read_json
from mtp_train.checkpoints.writing import write_json
from mtp_train.errors import ChangedInputError, CheckpointError

RECORD_FILE = "inputs.json"
TICK_NS = 2_000_000_000
"""The coarsest tick of a file system's clock in use: FAT's."""
_BLOCK_BYTES = 1 << 22
_MAX_THREADS = 8
_SHOWN_BYTES = 2_000_000_000
"""Fewer bytes are hashed without a progress bar."""
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
"""Files of a checkpoint's tokenizer."""
TEMPLATE_PATTERNS = ("chat_template*", "additional_chat_templates/*.jinja")
CHECKPOINT_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "hf_quant_config.json",
    *TOKENIZER_PATTERNS,
    *TEMPLATE_PATTERNS,
    # The checkpoint's own code, which trust_remote_code runs.
    "*.py",
)
"""Files of a checkpoint besides its weights and their index."""
Contents = Mapping[str, str]
"""File name to SHA-256, in hexadecimal."""


@dataclass(frozen=True)
class FileRecord:
    """The content hash of a file, and what the file system told of it when it was read."""

    sha256: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    read_ns: int

    @property
    def status(self) -> FileStatus:
        return self.size, self.mtime_ns, self.ctime_ns, self.inode, self.device


FileStatus = tuple[int, int, int, int, int]
"""Size, times, inode and device of a file; equal for the same unchanged file under any name."""


def file_status(found: os.stat_result) -> FileStatus:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


class InputFiles(NamedTuple):
    """The files that identify an input: a checkpoint, an adapter, a head or a source of data."""

    location: Path
    files: Mapping[str, Path]
    """Name to path; the names stay the same when the directory is moved."""


@dataclass(frozen=True)
class InputRecord:
    """The recorded content of an input."""

    location: str
    files: Mapping[str, FileRecord]

    @property
    def contents(self) -> Contents:
        """The identity of the input, which is compared."""
        return {name: record.sha256 for name, record in self.files.items()}


_RECORDS = TypeAdapter(dict[str, InputRecord])
Records = Mapping[str, InputRecord]
"""By the use of the input, such as ``model.trunk``."""


def checkpoint_files(checkpoint: Checkpoint) -> InputFiles:
    found = matching_files(checkpoint.path, CHECKPOINT_PATTERNS)
    if checkpoint.index is not None:
        found[INDEX_FILE] = checkpoint.path / INDEX_FILE
    found |= {info.file: checkpoint.path / info.file for info in checkpoint.tensors.values()}
    return InputFiles(checkpoint.path, dict(sorted(found.items())))


def directory_files(path: Path) -> InputFiles:
    """Return the files that identify an adapter or head directory: its configs and weights."""
    return InputFiles(path, matching_files(path, ("*_config.json", "*.safetensors")))


def matching_files(path: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the files of a directory that match the patterns: name in the directory to path."""
    names = sorted({str(file.relative_to(path)) for pattern in patterns for file in path.glob(pattern)})
    return {name: path / name for name in names if (path / name).is_file()}


def read_records(directory: Path) -> dict[str, InputRecord]:
    """Return the records of a run's or study's inputs; empty where there is no record file."""
    path = directory / RECORD_FILE
    if not path.is_file():
        return {}
    try:
        return _RECORDS.validate_python(read_json(path).get("inputs"))
    except ValidationError as invalid:
        raise CheckpointError(
            f"{path}: cannot be read ({invalid.errors()[0]['msg']}); expected the record that mtp-train wrote. Restore "
            "it, or choose another directory."
        ) from None


def write_records(directory: Path, records: Records) -> None:
    write_json(directory / RECORD_FILE, {"inputs": {label: asdict(one) for label, one in records.items()}})


def hash_inputs(inputs: Mapping[str, InputFiles], known: Records, progress: Progress) -> dict[str, InputRecord]:
    """Return the records of inputs. Files with the status of a settled record are not read."""
    recorded = [record for one in known.values() for record in one.files.values()]
    # Settled records: every later write changes the status.
    trusted = {record.status: record for record in recorded if record.ctime_ns + TICK_NS < record.read_ns}
    try:
        statuses = {path: file_status(path.stat()) for one in inputs.values() for path in one.files.values()}
        # By status: a file with several names is hashed once.
        unknown = {status: path for path, status in statuses.items() if status not in trusted}
        # The largest file determines the total time, so it comes first. hashlib releases the GIL.
        ordered = sorted(unknown, key=lambda status: -status[0])
        task = progress.add_task("hashing inputs", visible=sum(size for size, *_ in ordered) > _SHOWN_BYTES)
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            hashed = pool.map(lambda status: hash_file(unknown[status]), ordered)
            records = list(progress.track(hashed, total=len(ordered), task_id=task))
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read ({error.strerror}); expected a file that this user may read. Restore it "
            "or its permissions."
        ) from None
    found = trusted | dict(zip(ordered, records, strict=True))
    return {
        label: InputRecord(
            str(one.location.absolute()), {name: found[statuses[path]] for name, path in one.files.items()}
        )
        for label, one in inputs.items()
    }


def hash_file(path: Path) -> FileRecord:
    """Return the record of a file that no process writes to meanwhile."""
    with path.open("rb") as handle:
        before = file_status(os.fstat(handle.fileno()))
        read_ns = time.time_ns()
        digest = hashlib.sha256()
        while block := handle.read(_BLOCK_BYTES):
            digest.update(block)
        after = file_status(os.fstat(handle.fileno()))
    # Another process may add a link to the file, which changes its ctime.
    if before[:2] != after[:2]:
        raise CheckpointError(
            f"{path}: is being written to; expected files that no process writes to. Run the command again when the "
            "writer is done."
        )
    return FileRecord(digest.hexdigest(), *before, read_ns)


def changed_files(recorded: Contents, found: Contents) -> list[str]:
    """Return the names of files with another content, and of files that are gone or new."""
    return [
        name if name in recorded and name in found else f"{name} ({'gone' if name in recorded else 'new'})"
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    ]


def require_same(
    directory: Path,
    inputs: Mapping[str, InputFiles],
    progress: Progress,
    *,
    finished: bool,
    keeps: bool = True,
    option: str = "run_dir",
) -> None:
    """Check that inputs are the ones from which a directory's results were computed.

    Inputs that were touched, copied or moved pass if their content is the same.

    Args:
        keeps: Whether the new status of files that were hashed again is recorded, if the directory is writable.
        option: What names the directory.

    Raises:
        ChangedInputError: An input changed, or cannot be shown to be the same.
    """
    recorded = read_records(directory)
    changed = []
    records = hash_inputs({label: one for label, one in inputs.items() if label in recorded}, recorded, progress)
    for label, record in records.items():
        if names := changed_files(recorded[label].contents, record.contents):
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            changed.append(f"{label} ({record.location}): {', '.join(names[:5])}{more}")
    others = {label: one for label, one in inputs.items() if label not in recorded}
    changed += [f"{label} ({one.location}) was not among them" for label, one in others.items()]
    if changed:
        keeps_old = f" The results in {directory} are complete, and were computed from the old files."
        raise ChangedInputError(
            f"{directory}: inputs changed since it was begun: {'; '.join(changed)}; expected the files that it began "
            f"with. Restore the old files, or choose another {option} for the new ones.{keeps_old if finished else ''}"
        )
    if keeps and recorded != (updated := {**recorded, **records}):
        with contextlib.suppress(OSError):
            write_records(directory, updated)
