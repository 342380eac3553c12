"""Sort the files of a checkpoint's directory: those that a copy needs, and weights that are no part of the checkpoint.

The checkpoint is the single file, or the shards that the index names. Other weight files in the directory come from
earlier saves or other tools, and loaders disagree on them: vLLM and SGLang read every ``*.safetensors`` where there is
no index, SGLang an ``mtp.safetensors`` beside GLM-4.5's index, llama.cpp's converter and MLX every
``model*.safetensors``. The last copy of a tensor counts, so that one left-over file replaces the head or the trunk.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_train.checkpoints.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLE_SUFFIXES,
    Checkpoint,
    TensorInfo,
    scan_safetensors,
)
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.errors import CheckpointError

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
# The files beside the weights from which a model, its tokenizer or its processor is loaded.
_NAMED = re.compile(
    r".*config\.json|model\.safetensors\.index\.json|tokenizer.*\.(?:json|model)|spiece\.model|.*\.tiktoken"
    r"|(?:vocab|added_tokens|special_tokens_map)\.(?:json|txt)|merges\.txt|chat_template.*\.(?:json|jinja)"
)


def source_files(source: Checkpoint) -> list[Path]:
    """Return the files that a copy of a checkpoint needs, sorted by path: the weights, and the files beside them.

    Weights that the checkpoint does not name, an index that is not its own, hidden files, pickles, training
    checkpoints, and other models in subdirectories are left out.
    """
    # Weights are always included: their directories may have names like the ones that are left out.
    weights = _weights(source)
    beside = [file for file in _files_under(source.path, weights) if not _holds_weights(file)]
    if source.index is None:
        beside = [file for file in beside if file != source.path / INDEX_FILE]
    for file in beside:
        _require_known_link(source.path, file)
    return sorted(weights.union(beside))


def unnamed_weights(source: Checkpoint) -> dict[str, Mapping[str, TensorInfo]]:
    """Return the weight files in a checkpoint's directory that are no part of it, which copies leave out.

    Returns:
        POSIX path in the directory to the file's tensors; no tensors for a file that is not safetensors or is damaged.
    """
    files = filter(_holds_weights, _files_under(source.path, _weights(source)))
    names = (file.relative_to(source.path).as_posix() for file in files)
    return {name: _tensors(source.path / name, name) for name in sorted(names)}


def _tensors(path: Path, name: str) -> Mapping[str, TensorInfo]:
    # Opening a pipe would wait for a process that writes to it.
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        return scan_safetensors(path, name)
    except CheckpointError:
        return {}


def _holds_weights(file: Path) -> bool:
    """Return whether a file is named like weights, or like weights set aside, such as ``model.safetensors.bak``."""
    return file.suffix != ".json" and any(suffix in WEIGHT_SUFFIXES for suffix in file.suffixes)


def _weights(source: Checkpoint) -> set[Path]:
    return {source.path / info.file for info in source.tensors.values()}


def _files_under(directory: Path, weights: Set[Path]) -> Iterator[Path]:
    """Yield links and files other than ``weights``; links to directories too."""
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith((".", "checkpoint-")) or entry.suffix in PICKLE_SUFFIXES or entry in weights:
            continue
        if entry.is_symlink() or entry.is_file():
            yield entry
        elif entry.is_dir() and not (entry / CONFIG_FILE).exists():
            yield from _files_under(entry, weights)


def _require_known_link(root: Path, file: Path) -> None:
    """Raise a CheckpointError for a link that is neither one of a model's own files nor a link into the hub's cache."""
    if not file.is_symlink():
        return
    real_root = root.resolve()
    if file.is_file():
        # In the hub's cache every file of snapshots/REVISION is a link into blobs, two directories up.
        blobs = real_root.parents[1] / "blobs" if real_root.parent.name == "snapshots" else None
        if (file.parent == root and _NAMED.fullmatch(file.name)) or file.resolve().parent == blobs:
            return
    found = "a link to a directory" if file.is_dir() else "a link"
    raise CheckpointError(
        f"{file}: {found}, which could bring in files from anywhere; expected links only to weights, config, tokenizer "
        "and processor files, or into the hub cache's blobs. Replace the link with the file, or remove the link."
    )


@dataclass(frozen=True)
class UnnamedFile:
    """A weight file in a checkpoint's directory that the checkpoint does not name: no copy contains it."""

    file: str
    """POSIX path in the directory."""
    num_tensors: int
    """0 for a file that is not safetensors or is damaged."""
    num_head_tensors: int

    def __str__(self) -> str:
        if not self.num_tensors:
            return f"{self.file} (not readable as safetensors)"
        of_head = f", {self.num_head_tensors} of a head" if self.num_head_tensors else ""
        return f"{self.file} ({self.num_tensors} tensors{of_head})"


def unnamed_files(checkpoint: Checkpoint, layout: HeadLayout | None) -> tuple[UnnamedFile, ...]:
    """Return the weight files that are no part of a checkpoint, sorted by path. Reads their headers.

    Args:
        layout: Its head layout; None for a drafter, whose files have no trunk's layout.
    """
    is_head_key = layout.is_head_key if layout is not None else lambda key: False
    return tuple(
        UnnamedFile(file, len(tensors), sum(map(is_head_key, tensors)))
        for file, tensors in unnamed_weights(checkpoint).items()
    )


def with_found_head(checkpoint: Checkpoint, layout: HeadLayout, needed: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Return a checkpoint with the head of weight files that it does not name, or one that is under other names.

    The checkpoint itself is returned if it contains a head, if there is none to be found, or if two files contain one
    under the same key, so that which to take is for the user to say.

    Args:
        needed: The keys of a complete head with their shapes.
    """
    if any(layout.is_head_key(key) for key in checkpoint.tensors):
        return checkpoint
    beside = unnamed_weights(checkpoint).values()
    head = [(key, info) for tensors in beside for key, info in tensors.items() if layout.is_head_key(key)]
    if head:
        copies = Counter(key for key, _ in head)
        return checkpoint if max(copies.values()) > 1 else _with_tensors(checkpoint, dict(head))
    renamed = [found for stored in (checkpoint.tensors, *beside) if (found := _under_other_names(needed, stored))]
    return _with_tensors(checkpoint, renamed[0]) if len(renamed) == 1 else checkpoint


def _with_tensors(checkpoint: Checkpoint, head: Mapping[str, TensorInfo]) -> Checkpoint:
    return replace(checkpoint, tensors={**checkpoint.tensors, **head})


def _under_other_names(
    needed: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return the needed tensors that are stored with a prefix more (``language_model.``), or without their own."""
    first = min(needed)
    common = itertools.takewhile(
        lambda parts: len({*parts}) == 1, zip(*(key.split(".") for key in needed), strict=False)
    )
    own = "".join(f"{parts[0]}." for parts in common)
    prefixes = sorted({key.removesuffix(first) for key in stored if key.endswith(f".{first}")})
    for names in (
        {key: key.removeprefix(own) for key in needed},
        *({key: one + key for key in needed} for one in prefixes),
    ):
        if all(name in stored and stored[name].shape == needed[key] for key, name in names.items()):
            return {key: replace(stored[name], name=name) for key, name in names.items()}
    return {}


def left_out(files: Sequence[UnnamedFile]) -> tuple[str, ...]:
    """Return the sentence of a result that names the weight files that were not copied; empty without such files."""
    if not files:
        return ()
    return (f"Left out, as no part of the checkpoint: {', '.join(map(str, files))}.",)
