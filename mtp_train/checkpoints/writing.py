"""Write files and directories so that no partial output is left behind: to a temporary path, flushed, then renamed.

The safetensors writer streams one tensor at a time, or one block of a tensor, so that a head of any size is written in
the memory of its largest tensor. The ``safetensors`` package would hold all tensors in memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from mtp_train.errors import CheckpointError, FullDiskError, OutputExistsError

# Commands that write no tensor start without torch.
if TYPE_CHECKING:
    from torch import Tensor

    from mtp_train.checkpoints.files import TensorInfo

LOCK_FILE = "run.lock"
"""Names the process that writes to a directory of results."""


@dataclass(frozen=True)
class PendingTensor:
    """A tensor to be written: its key, stored dtype and shape, and a function that reads or computes its values."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]
    """Returns the values in consecutive slices along the first axis, so that the whole need not be in memory."""
    origin: tuple[Path, str] | None = None
    """The checkpoint and key from which it is copied unchanged; None for a new value."""

    def parts(self) -> Iterator[Tensor]:
        """Yield the values, which have to be as many as the shape says."""
        size = 0
        for block in self.blocks():
            size += block.numel()
            yield block
        if size != math.prod(self.shape):
            raise CheckpointError(
                f"{self.key}: {size} values; expected shape {list(self.shape)}. Use a head of this model."
            )

    def load(self) -> Tensor:
        import torch

        parts = [*self.parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def info(self, file: str) -> TensorInfo:
        from mtp_train.checkpoints.files import TensorInfo

        return TensorInfo(file, self.dtype, self.shape)


def held_tensor(key: str, dtype: str, value: Tensor) -> PendingTensor:
    """Return a tensor in memory as a pending one, to be written in the given stored dtype."""
    return PendingTensor(key, dtype, value.shape, lambda: [value])


def held_tensors(tensors: Mapping[str, Tensor]) -> list[PendingTensor]:
    """Return tensors in memory as pending ones, each in its own dtype."""
    from mtp_train.checkpoints.files import SAFETENSORS_DTYPES

    return [held_tensor(key, SAFETENSORS_DTYPES[value.dtype], value) for key, value in tensors.items()]


def raw_bytes(tensor: Tensor, dtype: str) -> memoryview:
    """Return a tensor's bytes in the given stored dtype, without a copy where it already has that dtype."""
    import torch

    from mtp_train.checkpoints.files import TORCH_DTYPES

    flat = tensor.detach().to("cpu", TORCH_DTYPES[dtype]).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


PLAIN = MappingProxyType({"format": "pt"})
"""The metadata that loaders expect."""


def write_safetensors(path: Path, tensors: Sequence[PendingTensor], metadata: Mapping[str, str] = PLAIN) -> None:
    """Write a new safetensors file, with one block of a tensor in memory at a time, and flush it to disk."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for pending in tensors:
        end = offset + pending.info("").num_bytes
        header[pending.key] = {"dtype": pending.dtype, "shape": pending.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    # Exclusively: a file that exists may be a link to one of the user's.
    with path.open("xb") as handle:
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        for pending in tensors:
            for part in pending.parts():
                handle.write(raw_bytes(part, pending.dtype))
        _flush(handle)


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


_NOT_WRITABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    # A file in the place of a directory, or above it.
    errno.EEXIST,
    errno.ENOTDIR,
)


@contextlib.contextmanager
def full_disk_is_named(target: Path, *, what: str) -> Iterator[None]:
    """Convert write failures on a full or read-only disk to an error for the user."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise FullDiskError(
            f"{target}: writing {what} failed ({os.strerror(error.errno)}); expected space and permission to write. "
            "Earlier files are unchanged. Free space, or choose another directory."
        ) from error
