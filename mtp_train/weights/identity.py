"""What makes two checkpoints the same: the content of every file that a result depends on.

A record keeps the SHA-256 of each file beside its size, times, inode and device. Files whose status is as recorded are
not read again. A file that was touched, copied, restored or moved to another disk or machine has another status: its
content is hashed again and decides.

The status counts only where it can show a change:

- Times advance in ticks. A file that was hashed within ``TICK_NS`` of its last change could be rewritten at the same
  size in the same tick and keep its status, so it is hashed again next time.
- A program can set the modification time (``cp -p``, ``os.utime``), so the change time (ctime), which it cannot set,
  must agree as well. A new hard link to a file changes it too; the price is one more hash.
- The name of a blob in the hub's cache is the SHA-256 that the server announced. It is not used in place of a hash:
  the hub client checks the size of a download, and a program that writes through the link keeps the name.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from mtp_train.errors import CheckpointError
from mtp_train.weights.files import INDEX_FILE, Checkpoint, read_json
from mtp_train.weights.writing import write_json

RECORD_FILE = "inputs.json"
TICK_NS = 2_000_000_000
"""The coarsest tick of a file system's clock in use: FAT's."""
HASH_BYTES_PER_SECOND = 1e9
"""Rate that plans are made with: SHA-256 with the instructions that current CPUs have, on one core."""
_BLOCK_BYTES = 1 << 22
_MAX_THREADS = 8
_SHOWN_SECONDS = 2.0
CHECKPOINT_PATTERNS = (
    *("config.json", "generation_config.json", "*processor_config.json", "hf_quant_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", "additional_chat_templates/*.jinja"),
    # Code of the checkpoint's own, which trust_remote_code runs.
    "*.py",
)
"""Files of a checkpoint besides its weights and their index."""
Contents = Mapping[str, str]
"""File name to SHA-256, in hexadecimal."""


class FileStatus(NamedTuple):
    """What a file system says of a file; equal for the same unchanged file, whatever it is called."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStatus:
        """Take what counts from the system's answer."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


@dataclass(frozen=True)
class FileRecord:
    """The content of a file, and the status under which it was read."""

    status: FileStatus
    read_ns: int
    sha256: str

    @property
    def is_settled(self) -> bool:
        """Whether any later write must change the status."""
        return self.status.ctime_ns + TICK_NS < self.read_ns


@dataclass(frozen=True)
class InputFiles:
    """The files that identify an input: a checkpoint, an adapter, a head or a source of data."""

    location: Path
    files: Mapping[str, Path]
    """By names that stay the same where the whole moves."""


@dataclass(frozen=True)
class InputRecord:
    """The recorded content of an input."""

    location: str
    files: Mapping[str, FileRecord]

    @property
    def contents(self) -> Contents:
        """The identity: what is compared."""
        return {name: record.sha256 for name, record in self.files.items()}


Records = Mapping[str, InputRecord]
"""By what the input is for, such as ``model.trunk``."""


def checkpoint_files(checkpoint: Checkpoint) -> InputFiles:
    """Return the files that identify a checkpoint."""
    found = matching_files(checkpoint.path, CHECKPOINT_PATTERNS)
    if checkpoint.index is not None:
        found[INDEX_FILE] = checkpoint.path / INDEX_FILE
    found |= {info.file: checkpoint.path / info.file for info in checkpoint.tensors.values()}
    return InputFiles(checkpoint.path, dict(sorted(found.items())))


def directory_files(path: Path) -> InputFiles:
    """Return the files that identify an adapter's or a head's directory: its configs and its weights."""
    return InputFiles(path, matching_files(path, ("*_config.json", "*.safetensors")))


def matching_files(path: Path, patterns: Iterable[str]) -> dict[str, Path]:
    """Return the files of a directory that match, by their names in it."""
    names = sorted({str(file.relative_to(path)) for pattern in patterns for file in path.glob(pattern)})
    return {name: path / name for name in names if (path / name).is_file()}


def stored_bytes(path: Path) -> int:
    """Return the bytes that identify a checkpoint or adapter, from its directory alone; 0 where it is not there."""
    files = matching_files(path, (*CHECKPOINT_PATTERNS, "*.json", "*.safetensors", "*/*.safetensors"))
    return sum(file.stat().st_size for file in files.values())


def read_records(directory: Path) -> dict[str, InputRecord]:
    """Return what a run or a study recorded of its inputs; nothing where it recorded none.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = directory / RECORD_FILE
    if not path.is_file():
        return {}
    try:
        return {
            label: InputRecord(one["location"], {name: _parsed(record) for name, record in one["files"].items()})
            for label, one in read_json(path)["inputs"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); expected the record that mtp-train wrote. "
            "Restore it, or choose another directory."
        ) from None


def _parsed(record: Mapping[str, Any]) -> FileRecord:
    return FileRecord(FileStatus(*(record[name] for name in FileStatus._fields)), record["read_ns"], record["sha256"])


def write_records(directory: Path, records: Records) -> None:
    """Write records beside what was made of the inputs."""
    inputs = {
        label: {
            "location": one.location,
            "files": {
                name: {"sha256": record.sha256, **record.status._asdict(), "read_ns": record.read_ns}
                for name, record in one.files.items()
            },
        }
        for label, one in records.items()
    }
    write_json(directory / RECORD_FILE, {"inputs": inputs})


def hash_inputs(inputs: Mapping[str, InputFiles], known: Records, progress: Progress) -> dict[str, InputRecord]:
    """Return the content of inputs. Files whose recorded status vouches for them are not read.

    Args:
        inputs: What to identify.
        known: Earlier records, of these inputs or others.
        progress: Where to show progress.

    Raises:
        CheckpointError: A file cannot be read, or is being written to.
    """
    trusted = {record.status: record for one in known.values() for record in one.files.values() if record.is_settled}
    statuses = {path: _status(path) for one in inputs.values() for path in one.files.values()}
    # By status: several names of one file cost one hash.
    unknown = {status: path for path, status in statuses.items() if status not in trusted}
    found = trusted | _hash_all(unknown, progress)
    return {
        label: InputRecord(
            str(one.location.absolute()), {name: found[statuses[path]] for name, path in one.files.items()}
        )
        for label, one in inputs.items()
    }


def _status(path: Path) -> FileStatus:
    try:
        return FileStatus.of(path.stat())
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read ({error.strerror}); expected a file that this user may read. Restore it or its "
        "permissions."
    )


def _hash_all(files: Mapping[FileStatus, Path], progress: Progress) -> dict[FileStatus, FileRecord]:
    if not files:
        return {}
    total = sum(status.size for status in files)
    visible = total > _SHOWN_SECONDS * HASH_BYTES_PER_SECOND
    task = progress.add_task("hashing inputs", total=total, visible=visible)
    stop = threading.Event()
    hashed = partial(_hash, on_bytes=partial(progress.advance, task), stop=stop)
    # hashlib releases the GIL. The largest file first: it is the one to wait for.
    ordered = sorted(files.items(), key=lambda item: -item[0].size)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(ordered))) as pool:
        try:
            records = list(pool.map(hashed, (path for _, path in ordered)))
        except BaseException:
            # An interrupt must not wait for the end of a large file.
            stop.set()
            raise
    return {status: record for (status, _), record in zip(ordered, records, strict=True)}


def _hash(path: Path, *, on_bytes: Callable[[int], None], stop: threading.Event) -> FileRecord:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as handle:
            before = FileStatus.of(os.fstat(handle.fileno()))
            read_ns = time.time_ns()
            left = before.size
            # A file that grows while it is read would have no end.
            while left > 0 and not stop.is_set() and (count := handle.readinto(buffer)):
                digest.update(buffer[:count])
                on_bytes(count)
                left -= count
            after = FileStatus.of(os.fstat(handle.fileno()))
    except OSError as error:
        raise _unreadable(path, error) from None
    if (before.size, before.mtime_ns) != (after.size, after.mtime_ns):
        raise CheckpointError(
            f"{path}: is being written to; expected files that nobody writes to. Start again when the writer is done."
        )
    return FileRecord(before, read_ns, digest.hexdigest())


def changed_files(recorded: Contents, found: Contents) -> list[str]:
    """Name the files whose content differs, those that are gone and those that are new."""
    return [
        name if name in recorded and name in found else f"{name} ({'gone' if name in recorded else 'new'})"
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    ]


def written_since(one: InputFiles, moment_ns: int) -> list[str]:
    """Name the files of an input that may have been written or put in place at a moment or after it.

    For directories of versions that recorded no content: files that are all older than the directory are the files
    that it began with. A directory or link that names them counts too, as it may name others by now.
    """
    places = {**one.files, "the directory": one.location}
    return [name for name, path in places.items() if any(_is_after(found, moment_ns) for found in _statuses(path))]


def _statuses(path: Path) -> list[os.stat_result]:
    try:
        return [path.lstat(), path.stat()]
    except OSError as error:
        raise _unreadable(path, error) from None


def _is_after(found: os.stat_result, moment_ns: int) -> bool:
    # An export that hard-links a shard changes its ctime, and nothing else.
    is_linked = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
    return found.st_mtime_ns >= moment_ns or (found.st_ctime_ns >= moment_ns and not is_linked)
