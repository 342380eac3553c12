"""Write files and directories so that no partial output is left behind: to a temporary path, flushed, then renamed.

The safetensors writer streams one tensor at a time, or one block of a tensor, so that a head of any size is written in
the memory of its largest tensor. The ``safetensors`` package would hold all tensors in memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mtp_train.errors import CheckpointError, FullDiskError, OutputExistsError

# Commands that write no tensor start without torch.
if TYPE_CHECKING:
    from torch import Tensor

    from mtp_train.checkpoints.files import TensorInfo

_BLOCK_BYTES = 1 << 25
"""Approximate size of a block that is held in memory; at least one row is."""
LOCK_FILE = "run.lock"
"""Names the process that writes to a directory of results."""


@dataclass(frozen=True)
class PendingTensor:
    """A tensor to be written: its header entry, and a function that loads it when it is written."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    blocks: Callable[[], Iterator[Tensor]] | None = None
    """Yields the same tensor in blocks of rows, for tensors that need not be in memory as a whole."""

    origin: tuple[Path, str] | None = None
    """The checkpoint and key from which it is copied unchanged; None for a new value."""

    def parts(self) -> Iterator[Tensor]:
        """Yield the tensor in blocks, or as a whole.

        Raises:
            CheckpointError: It has another shape than its header entry.
        """
        if self.blocks is not None:
            yield from self.blocks()
            return
        tensor = self.load()
        if tuple(tensor.shape) != self.shape:
            raise CheckpointError(
                f"{self.key}: shape {list(tensor.shape)}; expected {list(self.shape)}. Use a head of this model."
            )
        yield tensor

    @property
    def num_bytes(self) -> int:
        return self.info("").num_bytes

    def info(self, file: str) -> TensorInfo:
        from mtp_train.checkpoints.files import TensorInfo

        return TensorInfo(file, self.dtype, self.shape)


def held_tensor(key: str, dtype: str, value: Tensor) -> PendingTensor:
    """Return a tensor in memory as a pending one, to be written in the given stored dtype."""
    return PendingTensor(key, dtype, tuple(value.shape), lambda: value)


def raw_bytes(tensor: Tensor, dtype: str) -> memoryview:
    """Return a tensor's bytes in the given stored dtype, without a copy where it already has that dtype."""
    import torch

    from mtp_train.checkpoints.files import TORCH_DTYPES

    flat = tensor.detach().to("cpu", TORCH_DTYPES[dtype]).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def write_safetensors(path: Path, tensors: Sequence[PendingTensor]) -> None:
    """Write a new safetensors file, loading one tensor at a time, and flush it to disk.

    Raises:
        FileExistsError: ``path`` exists.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for pending in tensors:
        end = offset + pending.num_bytes
        header[pending.key] = {"dtype": pending.dtype, "shape": list(pending.shape), "data_offsets": [offset, end]}
        offset = end
    # Exclusively: a file that exists may be a link to one of the user's.
    with path.open("xb") as handle:
        handle.write(_encoded(header))
        for pending in tensors:
            for part in pending.parts():
                handle.write(raw_bytes(part, pending.dtype))
        _flush(handle)


RowChange = Callable[[int, "Tensor"], "Tensor"]
"""From the number of a block's first row, and the stored block, to the block that replaces it (in any dtype)."""


def rewrite_safetensors(source: Path, target: Path, changes: Mapping[str, RowChange | PendingTensor]) -> None:
    """Write a copy of a safetensors file with some tensors changed, with one block of rows in memory at a time.

    Header, order, dtypes and shapes stay the same, and so does every byte of the other tensors; a replaced tensor may
    get more or fewer rows.

    Args:
        source: The file to read.
        target: The new file.
        changes: Key to the change of its tensor, or to the tensor of the same dtype that replaces it.

    Raises:
        CheckpointError: A changed tensor is no longer finite in its stored dtype.
        FileExistsError: ``target`` exists.
    """
    import torch

    from mtp_train.checkpoints.files import TORCH_DTYPES, all_finite

    with source.open("rb") as reader, target.open("xb") as writer:
        size = reader.read(8)
        encoded = reader.read(int.from_bytes(size, "little"))
        header = json.loads(encoded)
        writer.write(_resized_header(header, changes) or size + encoded)
        header.pop("__metadata__", None)
        for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            start, end = entry["data_offsets"]
            change = changes.get(key)
            if change is None:
                for offset in range(start, end, _BLOCK_BYTES):
                    writer.write(reader.read(min(_BLOCK_BYTES, end - offset)))
                continue
            if isinstance(change, PendingTensor):
                for part in change.parts():
                    writer.write(raw_bytes(part, entry["dtype"]))
                reader.seek(end - start, os.SEEK_CUR)
                continue
            shape, dtype = entry["shape"] or [1], entry["dtype"]
            row_bytes = (end - start) // shape[0]
            rows = max(1, _BLOCK_BYTES // row_bytes)
            for first in range(0, shape[0], rows):
                data = bytearray(reader.read(min(rows, shape[0] - first) * row_bytes))
                block = torch.frombuffer(data, dtype=TORCH_DTYPES[dtype]).view(-1, *shape[1:])
                changed = change(first, block).to(TORCH_DTYPES[dtype])
                if not all_finite(changed):
                    raise CheckpointError(
                        f"{source}: {key} would contain NaN or infinite values in {dtype}; expected finite weights. "
                        "Use an adapter that was trained on this base."
                    )
                writer.write(raw_bytes(changed, dtype))
        _flush(writer)
    shutil.copymode(source, target)


def _resized_header(header: Mapping[str, Any], changes: Mapping[str, RowChange | PendingTensor]) -> bytes | None:
    """Return the header of a file in which replaced tensors have other shapes; None where all keep theirs."""
    shapes = {key: list(change.shape) for key, change in changes.items() if isinstance(change, PendingTensor)}
    if all(header[key]["shape"] == shape for key, shape in shapes.items()):
        return None
    written, offset = {key: entry for key, entry in header.items() if key == "__metadata__"}, 0
    tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
    for key, entry in sorted(tensors.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        shape, size = shapes.get(key, entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
        if key in shapes:
            size = size // entry["shape"][0] * shape[0]
        written[key] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    return _encoded(written)


def _encoded(header: Mapping[str, Any]) -> bytes:
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, content: str) -> None:
    write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> None:
    with replaced(path) as handle:
        handle.write(content)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside ``path`` to write; after the block it is flushed and renamed over ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    # Of a process that was killed.
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as handle:
        yield handle
        _flush(handle)
    temporary.replace(path)


def _flush(handle: IO[Any]) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_existing(target: Path, *, what: str) -> None:
    if target.exists() or target.is_symlink():
        raise OutputExistsError(
            f"{target}: already exists; expected a new path for {what}. Choose another path, or remove it first."
        )


@contextlib.contextmanager
def new_directory(target: Path, *, what: str) -> Iterator[Path]:
    """Yield a temporary directory in the target's parent, and rename it to the target when the block succeeds.

    If the block fails, also on a full disk, nothing is left behind.

    Raises:
        OutputExistsError: The target exists.
        CheckpointError: The disk is full or not writable.
    """
    refuse_existing(target, what=what)
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target}: cannot write there ({error.strerror}). Choose another --out.") from None
    try:
        with full_disk_is_named(target, what=what):
            temporary.chmod(0o755)
            yield temporary
            sync_directory(temporary)
            temporary.rename(target)
            sync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():
            # Innermost first, up to the first that is not empty.
            with contextlib.suppress(OSError):
                for parent in made:
                    parent.rmdir()


@contextlib.contextmanager
def removed_on_failure(target: Path) -> Iterator[None]:
    """Remove a directory that the caller has just written where the block, which completes it, fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@contextlib.contextmanager
def full_disk_is_named(target: Path, *, what: str) -> Iterator[None]:
    """Convert write failures on a full or read-only disk to an error for the user.

    Raises:
        FullDiskError: The disk is full or not writable.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise FullDiskError(
            f"{target}: writing {what} failed ({os.strerror(error.errno)}); expected space and permission to write. "
            "Earlier files are unchanged. Free space, or choose another directory."
        ) from error
