"""Check that all processes see the same files: each reads what the others wrote, also on another machine.

Inputs may be copies on each machine, which must not differ.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import TrainingError
from mtp_train.runs.head_source import RunHead
from mtp_train.runs.run_directory import checkpoint_identity
from mtp_train.train.launch import RunAccelerator

ATTEMPTS, PAUSE_SECONDS = 60, 1.0
"""A network file system may show new files only after its cache's time, by default up to a minute for NFS."""
SMALL_BYTES = 1 << 16


def require_shared(directory: Path, names: Sequence[str], accelerator: RunAccelerator) -> None:
    """Wait for all processes, then until every one sees the same files; every process must call it.

    Args:
        directory: The directory that they share.
        names: Files in it, or directories with all their files; they may be missing, but then for all processes.
        accelerator: The processes.

    Raises:
        TrainingError: The files differ between processes, as on machines without a common file system.
    """
    for _ in range(ATTEMPTS):
        first, *others = accelerator.gather_items([files_in(directory, names)])
        odd = [rank for rank, seen in enumerate(others, start=1) if seen != first]
        if not odd:
            return
        time.sleep(PAUSE_SECONDS)
    differing = sorted({path for path, _ in first.items() ^ others[odd[0] - 1].items()})
    raise TrainingError(
        f"run_dir: {directory}: processes 0 and {odd[0]} see different files ({', '.join(differing[:3])}); expected "
        "one directory for all machines. Put run_dir on a file system that they share."
    )


def files_in(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the size of every file by its path, and of small ones a hash of the content."""
    found = {}
    for name in names:
        top = directory / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                size = path.stat().st_size
                content = hashlib.sha256(path.read_bytes()).hexdigest() if size <= SMALL_BYTES else ""
                found[str(path.relative_to(directory))] = f"{size} {content}"
    return found


def require_alike(what: str, checksum: str, accelerator: RunAccelerator) -> None:
    """Check that all processes read the same inputs; every process must call it.

    Raises:
        TrainingError: A process reads others than the main process.
    """
    (first, _), *others = accelerator.gather_items([(checksum, socket.gethostname())])
    for rank, (other, host) in enumerate(others, start=1):
        if other != first:
            raise TrainingError(
                f"{what}: the files of process {rank} on {host} differ from those of process 0; expected the same on "
                "all machines. Put them on a file system that the machines share, or copy them again."
            )


def checkpoints_checksum(checkpoints: Iterable[Checkpoint | RunHead | None]) -> str:
    """Return a checksum of the configs and indices of checkpoints; weights are not read."""
    found = [checkpoint_identity("", one)["sha256"] for one in checkpoints if one is not None]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def text_checksum(documents: Iterable[Document], prompts: Iterable[Prompt]) -> str:
    """Return a checksum of tokens, targets and groups of documents, and of tokens and groups of prompts."""
    checksum = hashlib.sha256()
    for document in documents:
        checksum.update(repr((document.id, document.group, len(document.input_ids))).encode())
        checksum.update(document.input_ids.tobytes())
        checksum.update(document.loss_mask.tobytes())
    for prompt in prompts:
        checksum.update(repr((prompt.id, prompt.group, list(prompt.prompt_ids))).encode())
    return checksum.hexdigest()
