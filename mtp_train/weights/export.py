"""Writing a checkpoint with a head: copy the source, patch what the head needs, touch nothing else.

Trunk bytes are never re-encoded. A file that needs no change is hard-linked (or copied); a shard that already holds
head tensors of the same shape and dtype is copied and patched in place; head tensors that have no place yet go into one
more shard that the index names. A shard with a packed head that a new one replaces is written without it.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal

from mtp_train.errors import CheckpointError
from mtp_train.weights.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    Checkpoint,
    TensorInfo,
    read_json,
)
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import NativeHead, stored_tensor
from mtp_train.weights.quantised import (
    MODELOPT_FILE,
    PLAIN_DTYPES,
    leave_alone,
    leave_alone_in_modelopt,
    packed_weight,
    plain_modules,
    scale_of,
)
from mtp_train.weights.writing import (
    PendingTensor,
    full_disk_is_named,
    new_directory,
    patch_safetensors,
    sync_directory,
    write_json,
    write_safetensors,
)

HEAD_FILE = "model-mtp.safetensors"
LinkMode = Literal["hard", "copy"]
# Files beside the weights that a model, its tokenizer or its processor is loaded from.
_NAMED = re.compile(
    r".*config\.json|model\.safetensors\.index\.json|tokenizer.*\.(?:json|model)|spiece\.model|.*\.tiktoken"
    r"|(?:vocab|added_tokens|special_tokens_map)\.(?:json|txt)|merges\.txt|chat_template.*\.(?:json|jinja)"
)


def write_checkpoint(source: Checkpoint, layout: HeadLayout, head: NativeHead, out: Path, *, link: LinkMode) -> None:
    """Write ``source`` with ``head`` to a new directory.

    Args:
        source: The checkpoint whose trunk is exported; it is only read.
        layout: Its head layout.
        head: The head to put in, keys in ``layout``.
        out: The new directory.
        link: Hard-link unchanged files where the file system allows, or copy them all.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: A head tensor does not fit the one it replaces, or the disk is full.
    """
    tensors = [*head.tensors, *shared_tensors(source, layout, head)]
    dropped = _replaced_packed(source, layout, tensors)
    patches, additions = _sort_by_place(source, layout, tensors, dropped)
    trimmed = {source.tensors[key].file for key in dropped}
    added_to = _new_file(source)
    renames = _shard_names(source, additions)
    documents = patched_documents(source, layout, head)
    files = source_files(source)
    with new_directory(out, what="the checkpoint") as directory:
        skipped = {INDEX_FILE, *documents}
        for file in files:
            relative = file.relative_to(source.path)
            target = directory / renames.get(str(relative), str(relative))
            target.parent.mkdir(parents=True, exist_ok=True)
            if str(relative) in trimmed:
                _write_without(source, str(relative), dropped, patches.get(str(relative), []), target)
            elif str(relative) in patches:
                shutil.copyfile(file, target)
                patch_safetensors(target, patches[str(relative)])
            elif str(relative) not in skipped:
                place_file(file, target, link)
        if additions:
            write_safetensors(directory / renames.get(added_to, added_to), additions)
        for name, document in documents.items():
            write_json(directory / name, document)
        if source.index is not None or additions:
            write_json(directory / INDEX_FILE, _index(source, additions, added_to, renames, dropped))


def add_in_place(source: Checkpoint, layout: HeadLayout, head: NativeHead) -> None:
    """Add ``head`` to a checkpoint that lacks it, in its own directory. No tensor of the trunk is read or moved.

    A loader finds the checkpoint without the head, or with it, whenever this is interrupted: the last rename counts.

    Args:
        source: The checkpoint; nobody else may be writing to it.
        layout: Its head layout.
        head: The head to put in, keys in ``layout``.

    Raises:
        CheckpointError: It holds another head's tensors, or the disk is full.
    """
    tensors = [*head.tensors, *shared_tensors(source, layout, head)]
    patches, additions = _sort_by_place(source, layout, tensors, set())
    if patches:
        raise CheckpointError(
            f"{source.path}: holds {len(patches)} file(s) with head tensors of its own; expected a checkpoint without "
            "any. Use mtp-train graft, which writes a new one."
        )
    added_to, renames = _new_file(source), _shard_names(source, additions)
    shard = source.path / renames.get(added_to, added_to)
    temporary = shard.with_name(f".{shard.name}.tmp")
    documents = patched_documents(source, layout, head)
    with full_disk_is_named(source.path, what="the head"):
        try:
            write_safetensors(temporary, additions)
            temporary.replace(shard)
        finally:
            temporary.unlink(missing_ok=True)
        write_json(source.path / INDEX_FILE, _index(source, additions, added_to, renames, set()))
        for name, document in documents.items():
            write_json(source.path / name, document)
        if SINGLE_FILE in renames:
            # transformers reads a single file as long as there is one, and the index from here on.
            (source.path / SINGLE_FILE).replace(source.path / renames[SINGLE_FILE])
            # Left of an earlier save in shards: transformers clears away its own.
            (source.path / HEAD_FILE).unlink(missing_ok=True)
        sync_directory(source.path)


def shared_tensors(source: Checkpoint, layout: HeadLayout, head: NativeHead) -> Iterator[PendingTensor]:
    """Yield the keys that repeat trunk tensors, filled from the trunk that is exported."""
    for key in head.shared_keys:
        shared = layout.shared_key(key)
        if shared is None:
            raise CheckpointError(
                f"{key}: not a key that {layout.family.title} shares with its trunk; expected a head of this family. "
                "Write the head again."
            )
        yield stored_tensor(source, layout.trunk_key(shared, source.tensors), key)


def _replaced_packed(source: Checkpoint, layout: HeadLayout, tensors: list[PendingTensor]) -> set[str]:
    """Return the keys of packed head weights, and of what belongs to them, that new plain ones take the place of."""
    new = {pending.key for pending in tensors}
    parts = {key: packed_weight(key) for key in source.tensors if layout.is_head_key(key)}
    # Stacked experts may be replaced one by one.
    new |= {re.sub(r"\.experts\.\d+\..*", ".experts.", key) for key in new}
    packed = {
        key
        for key, weight in parts.items()
        if weight is not None and key not in new and (weight in new or re.sub(r"\w+_proj$", "", weight) in new)
    }
    return packed | {weight for weight in map(parts.get, packed) if weight is not None and weight in source.tensors}


def _write_without(
    source: Checkpoint, file: str, dropped: set[str], patches: list[PendingTensor], target: Path
) -> None:
    """Write a shard without some of its tensors; not at all where none is left."""
    patched = {pending.key: pending for pending in patches}
    keys = [key for key, info in source.tensors.items() if info.file == file and key not in dropped]
    if keys:
        write_safetensors(target, [patched.get(key) or stored_tensor(source, key, key) for key in keys])


def _sort_by_place(
    source: Checkpoint, layout: HeadLayout, tensors: list[PendingTensor], dropped: set[str]
) -> tuple[dict[str, list[PendingTensor]], list[PendingTensor]]:
    """Split head tensors into those that replace stored ones, by file, and those that have no place yet."""
    patches: dict[str, list[PendingTensor]] = {}
    additions: list[PendingTensor] = []
    for pending in tensors:
        stored = source.tensors.get(pending.key)
        if stored is None or pending.key in dropped:
            additions.append(pending)
        elif pending.origin == (source.path, pending.key):
            # It is there already, as it is to be.
            continue
        elif pending.dtype in PLAIN_DTYPES and scale_of(pending.key, source.tensors) is not None:
            raise CheckpointError(
                f"{source.path}: its own head is stored in {stored.dtype} ({pending.key}); expected a head in plain "
                "floats, or none, in the place of a new one. Put the new head on the unquantised checkpoint."
            )
        elif (stored.dtype, stored.shape) == (pending.dtype, pending.shape):
            patches.setdefault(stored.file, []).append(pending)
        else:
            raise CheckpointError(
                f"{source.path}: {pending.key} is {stored.dtype} {list(stored.shape)}, the new head's is "
                f"{pending.dtype} "
                f"{list(pending.shape)}; expected the same. Use a head of this checkpoint's family and dtype."
            )
    new = {pending.key for pending in tensors}
    stray = {key for key in source.tensors if layout.is_head_key(key)} - new - dropped
    if stray:
        raise CheckpointError(
            f"{source.path}: holds head tensors that the new head lacks ({', '.join(sorted(stray)[:3])}); expected the "
            "same keys. Use a head of this checkpoint's family."
        )
    return patches, additions


def _new_file(source: Checkpoint) -> str:
    """Return a name that no shard has: a head's shard may be there that keeps some of its tensors."""
    taken = {info.file for info in source.tensors.values()}
    names = itertools.chain([HEAD_FILE], (f"model-mtp-{number}.safetensors" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _shard_names(source: Checkpoint, additions: list[PendingTensor]) -> Mapping[str, str]:
    """Return new names for shards.

    A single ``model.safetensors`` that gets company becomes shard 1 of 2: beside an index, loaders disagree on which of
    ``model.safetensors`` and the index counts (transformers takes the file, vLLM the index).
    """
    if source.index is None and additions:
        return {SINGLE_FILE: "model-00001-of-00002.safetensors", HEAD_FILE: "model-00002-of-00002.safetensors"}
    return {}


def patched_documents(source: Checkpoint, layout: HeadLayout, head: NativeHead) -> dict[str, Any]:
    """Return the JSON files that have to change, by name; what already says the right thing is linked verbatim.

    The config gets the head's fields. Where it is quantised and the head comes from elsewhere, in plain floats, the
    head is named among its exceptions.

    Raises:
        CheckpointError: The quantisation's exceptions are not known here.
    """
    config = _with_fields(source, head.config_fields)
    documents: dict[str, Any] = {} if config is None else {CONFIG_FILE: config}
    if all(pending.origin == (source.path, pending.key) for pending in head.tensors):
        return documents
    groups = plain_modules(head.tensors, layout)
    quantised = leave_alone(config or source.config, groups, where=str(source.path))
    if quantised is not None:
        documents[CONFIG_FILE] = quantised
    if (source.path / MODELOPT_FILE).is_file():
        modelopt = leave_alone_in_modelopt(read_json(source.path / MODELOPT_FILE), groups)
        documents |= {} if modelopt is None else {MODELOPT_FILE: modelopt}
    return documents


def _with_fields(source: Checkpoint, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    config = copy.deepcopy(dict(source.config))
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else config
    for name, value in fields.items():
        (config if name == source.family.count.section else text_config)[name] = value
    return None if config == source.config else config


def _index(
    source: Checkpoint,
    additions: list[PendingTensor],
    added_to: str,
    renames: Mapping[str, str],
    dropped: set[str],
) -> dict[str, Any]:
    tensors: dict[str, TensorInfo] = {key: info for key, info in source.tensors.items() if key not in dropped}
    tensors.update({pending.key: pending.info(added_to) for pending in additions})
    old_metadata = (source.index or {}).get("metadata")
    metadata = dict(old_metadata) if isinstance(old_metadata, dict) else {}
    metadata["total_size"] = sum(info.num_bytes for info in tensors.values())
    return {
        "metadata": metadata,
        "weight_map": {key: renames.get(info.file, info.file) for key, info in sorted(tensors.items())},
    }


def source_files(source: Checkpoint) -> list[Path]:
    """Return the files a copy needs: the weights, and what is beside them, in the order of their paths.

    Left out are hidden files, pickles, training checkpoints and other models in subdirectories.

    Raises:
        CheckpointError: A link is among them that the checkpoint does not name: it could lead anywhere.
    """
    # Weights count wherever they are: their directories may be named like those that are left out.
    weights = {source.path / info.file for info in source.tensors.values()}
    return sorted(weights.union(_files_under(source.path, source.path, weights)))


def _files_under(root: Path, directory: Path, weights: Set[Path]) -> Iterator[Path]:
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith((".", "checkpoint-")) or entry.suffix in PICKLE_SUFFIXES or entry in weights:
            continue
        if entry.is_symlink():
            _require_known_link(root, entry)
            yield entry
        elif entry.is_dir():
            yield from _files_under(root, entry, weights) if not (entry / CONFIG_FILE).exists() else ()
        elif entry.is_file():
            yield entry


def _require_known_link(root: Path, link: Path) -> None:
    """Raise a CheckpointError for a link, unless it is of a model's own files or leads into the hub cache's blobs."""
    real_root = root.resolve()
    if link.is_file():
        # In the hub's cache every file of snapshots/REVISION is a link into blobs, two directories up.
        blobs = real_root.parents[1] / "blobs" if real_root.parent.name == "snapshots" else None
        if (link.parent == root and _NAMED.fullmatch(link.name)) or link.resolve().parent == blobs:
            return
    found = "a link to a directory" if link.is_dir() else "a link"
    raise CheckpointError(
        f"{link}: {found}, which could bring in files from anywhere; expected links only to weights, config, tokenizer "
        "and processor files, or into the hub cache's blobs. Put the file in the place of the link, or remove the link."
    )


def place_file(file: Path, target: Path, link: LinkMode) -> None:
    """Hard-link a file into a checkpoint, or copy it."""
    # The hub's cache keeps symbolic links; the link must be to the file behind them.
    real = file.resolve()
    if link == "hard":
        try:
            os.link(real, target)
        except OSError:
            shutil.copyfile(real, target)
    else:
        shutil.copyfile(real, target)
