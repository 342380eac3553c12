"""Write a checkpoint with a head: all of it (:func:`write_checkpoint`), in its own directory, or the head alone.

Trunk bytes are never re-encoded. :func:`write_checkpoint` hard-links or copies a file that needs no change. A shard
with tensors that change, or of a head that is replaced, is written anew. Tensors under new keys go into one new shard,
which the index lists.

A file of the source is never written to, also not through a link: only the weights that the checkpoint names are
linked, and every file is created exclusively.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from rich.progress import Progress

from mtp_train.checkpoints.adapter import Merge
from mtp_train.checkpoints.files import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHT_SUFFIXES,
    Checkpoint,
    JsonObject,
    open_checkpoint,
    read_json,
    read_metadata,
    source_files,
)
from mtp_train.checkpoints.native import NativeHead, marked, shared_tensors, stored_tensor
from mtp_train.checkpoints.quantised import (
    MODELOPT_FILE,
    leave_alone,
    leave_alone_in_modelopt,
    packed_keys,
    plain_modules,
    unlisted_layers,
    unmatched_by_sglang,
)
from mtp_train.checkpoints.writing import (
    PLAIN,
    PendingTensor,
    full_disk_is_named,
    new_directory,
    raw_bytes,
    sync_directory,
    write_json,
    write_safetensors,
)
from mtp_train.errors import CheckpointError
from mtp_train.families import RawConfig

HEAD_FILE = "model-mtp.safetensors"
LinkMode = Literal["hard", "copy"]


def write_checkpoint(
    source: Checkpoint,
    head: NativeHead | None,
    out: Path,
    *,
    link: LinkMode,
    progress: Progress,
    merge: Merge | None = None,
) -> str:
    """Write ``source`` to a new directory, with an adapter merged into its trunk, and ``head`` in place of its own.

    Args:
        head: None leaves the source's own head as it is.
        merge: None leaves the trunk as it is.

    Returns:
        How many tensors of the trunk were compared with the source's afterwards, byte for byte, and what was found.
    """
    merge = merge or Merge()
    placed = _placed(source, head, merge.tensors, os.listdir(source.path))
    changed = {source.tensors[key].file for key in {*placed.patches, *placed.dropped}}
    changed |= {file for file, _ in source.superseded}
    documents = patched_documents(source, head, merge.config_fields)
    index = placed.new_index(source) if source.index is not None or placed.additions else None
    if index != source.index:
        documents[INDEX_FILE] = index
    left_out = {*documents, *merge.files}
    files = [file for file in source_files(source) if _name_in(source, file) not in left_out]
    with new_directory(out, what="the checkpoint") as directory:
        for file in progress.track(files, description=f"writing {out.name}"):
            name = _name_in(source, file)
            target = directory / placed.renames.get(name, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if name not in changed:
                place_file(file, target, link)
                continue
            keys = (key for key, info in source.tensors.items() if info.file == name and key not in placed.dropped)
            tensors = [placed.patches.get(key) or stored_tensor(source, key, key) for key in keys]
            if tensors:
                kept = read_metadata(file)
                write_safetensors(target, tensors, kept if head is None else marked(kept, head))
        if head is not None and placed.additions:
            write_safetensors(directory / placed.shard, placed.additions, marked(PLAIN, head))
        for name, replacement in merge.files.items():
            if replacement is not None:
                (directory / name).parent.mkdir(exist_ok=True)
                copy_file(replacement, directory / name)
        _write_documents(directory, documents)
        trunk = [key for key in source.tensors if not source.layout.is_head_key(key)]
        copied = [key for key in trunk if key not in merge.tensors]
        written = open_checkpoint(directory)
        for key in progress.track(copied, description=f"comparing {out.name}"):
            if not _same_bytes(source, written, key):
                raise CheckpointError(
                    f"{out}: {key} has other bytes than in {source.path}; expected a copy. Check the disk, and write "
                    "it again."
                )
    return f"{len(trunk)} tensors, all bytes {'' if copied == trunk else f'of {len(copied)} '}equal"


def _same_bytes(source: Checkpoint, written: Checkpoint, key: str) -> bool:
    ours = source.tensors[key]
    theirs = written.tensors[key]
    # A hard link is the same file.
    if os.path.samefile(source.path / ours.file, written.path / theirs.file):
        return True
    blocks = zip(source.read_in_blocks(key), written.read_in_blocks(key), strict=True)
    return all(raw_bytes(mine, ours.dtype) == raw_bytes(other, ours.dtype) for mine, other in blocks)


def _name_in(source: Checkpoint, file: Path) -> str:
    return file.relative_to(source.path).as_posix()


def add_in_place(source: Checkpoint, head: NativeHead) -> None:
    """Add ``head`` to a checkpoint that lacks it, in its own directory. No tensor of the trunk is read or moved.

    If this is interrupted, loaders find the checkpoint without the head or with it: the last rename decides.

    Raises:
        CheckpointError: The checkpoint has tensors of another head, or the disk is full.
    """
    # A head shard of an earlier save into this directory, whose index transformers has replaced.
    earlier = source.path / HEAD_FILE
    has_earlier = os.path.lexists(earlier) and HEAD_FILE not in {info.file for info in source.tensors.values()}
    taken = set(os.listdir(source.path)) - ({HEAD_FILE} if has_earlier else set())
    own = [key for key in source.tensors if source.layout.is_head_key(key)]
    if own:
        raise CheckpointError(
            f"{source.path}: has {len(own)} head tensors already; expected a checkpoint without a head. Use mtp-train "
            "graft, which writes a new checkpoint."
        )
    placed = _placed(source, head, {}, taken)
    shard = source.path / placed.shard
    temporary = shard.with_name(f".{shard.name}.tmp")
    documents = patched_documents(source, head)
    with full_disk_is_named(source.path, what="the head"):
        try:
            temporary.unlink(missing_ok=True)
            write_safetensors(temporary, placed.additions, marked(PLAIN, head))
            if has_earlier:
                # llama.cpp's converter would read it after the new shard, and keep its tensors.
                earlier.unlink()
            temporary.replace(shard)
        finally:
            temporary.unlink(missing_ok=True)
        write_json(source.path / INDEX_FILE, placed.new_index(source))
        _write_documents(source.path, documents)
        if SINGLE_FILE in placed.renames:
            # transformers reads the single file while it exists, and the index after this rename.
            (source.path / SINGLE_FILE).replace(source.path / placed.renames[SINGLE_FILE])
        sync_directory(source.path)


def write_head_only(source: Checkpoint, head: NativeHead, out: Path) -> None:
    """Write the head with the files that an engine needs to load it alone: embedding, lm_head, config and tokenizer.

    An engine replaces the embedding and the lm_head with the trunk's, but does not start without them.
    """
    layout = source.layout
    found = (layout.embed_key, layout.lm_head_key.removesuffix("weight"), layout.embed_norm_key)
    ends = tuple(filter(None, found))
    tensors = [stored_tensor(source, key, key) for key in sorted(source.tensors) if key.startswith(ends)]
    tensors += [*head.tensors, *shared_tensors(source, head)]
    documents = patched_documents(source, head)
    files = source_files(source)
    with new_directory(out, what="the head") as directory:
        write_safetensors(directory / SINGLE_FILE, tensors, marked(PLAIN, head))
        for file in files:
            kept = file.parent == source.path and file.suffix not in WEIGHT_SUFFIXES and file.name != INDEX_FILE
            if kept and file.name not in documents:
                copy_file(file, directory / file.name)
        _write_documents(directory, documents)


def _write_documents(directory: Path, documents: JsonObject) -> None:
    for name, document in documents.items():
        write_json(directory / name, document)


class _Placed(NamedTuple):
    """The places of new tensors in a copy of a checkpoint."""

    patches: Mapping[str, PendingTensor]
    """By key, the tensors that replace stored ones in their shards."""
    additions: Sequence[PendingTensor]
    """The tensors of a new shard."""
    shard: str
    """The new shard's file name."""
    dropped: Collection[str]
    """Keys of stored tensors that the copy lacks."""
    renames: Mapping[str, str]
    """Old file name to new one."""

    def new_index(self, source: Checkpoint) -> JsonObject:
        """Return the copy's index, which lists every tensor, also those that the source's own index does not."""
        tensors = {key: info for key, info in source.tensors.items() if key not in self.dropped}
        tensors |= {key: pending.info(tensors[key].file) for key, pending in self.patches.items()}
        tensors |= {pending.key: pending.info(self.shard) for pending in self.additions}
        old = source.index or {}
        metadata = dict(old["metadata"]) if isinstance(old.get("metadata"), dict) else {}
        new = {
            "metadata": {**metadata, "total_size": sum(info.num_bytes for info in tensors.values())},
            "weight_map": {key: self.renames.get(info.file, info.file) for key, info in sorted(tensors.items())},
        }
        if new != source.index:
            # Shapes of packed weights do not give this count.
            new["metadata"].pop("total_parameters", None)
        return new


def _placed(
    source: Checkpoint,
    head: NativeHead | None,
    changes: Mapping[str, PendingTensor],
    taken: Collection[str],
) -> _Placed:
    """Sort changed tensors and a new head's into replacements of stored tensors and a new shard.

    The new head takes the place of the old one as a whole: also an old tensor under a key that it lacks is dropped.

    Args:
        taken: The file names that the new shard may not have.
    """
    patches, additions, dropped = dict(changes), list[PendingTensor](), set[str]()
    if head is not None:

        def of_trunk(source: Checkpoint, key: str, new_key: str) -> PendingTensor:
            return replace(changes[key], key=new_key) if key in changes else stored_tensor(source, key, new_key)

        new = {one.key: one for one in (*head.tensors, *shared_tensors(source, head, of_trunk))}
        dropped = {key for key in source.tensors if source.layout.is_head_key(key)} - new.keys()
        changed = {key: one for key, one in new.items() if one.origin != (source.path, key)}
        patches |= {key: one for key, one in changed.items() if key in source.tensors}
        additions = [one for key, one in new.items() if key not in source.tensors]
    shard = _free_name(HEAD_FILE, taken)
    renames = _shard_names(source, additions, shard, taken)
    return _Placed(patches, additions, renames.get(shard, shard), dropped, renames)


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return a name that no file of the source has, whether its index names that file or not."""
    stem = name.removesuffix(".safetensors")
    numbered = (f"{stem}-{number}.safetensors" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)


def _shard_names(
    source: Checkpoint, additions: list[PendingTensor], shard: str, taken: Collection[str]
) -> Mapping[str, str]:
    """Return new names for shards, old name to new.

    A ``model.safetensors`` that becomes one of several shards gets another name. Beside an index, loaders disagree on
    whether ``model.safetensors`` or the index counts (transformers takes the file, vLLM the index).
    """
    files = {info.file for info in source.tensors.values()}
    if SINGLE_FILE not in files or not (additions or len(files) > 1):
        return {}
    both = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    if files == {SINGLE_FILE} and not {*both} & {*taken}:
        return dict(zip((SINGLE_FILE, shard), both, strict=True))
    return {SINGLE_FILE: _free_name("model-trunk.safetensors", taken)}


def patched_documents(
    source: Checkpoint, head: NativeHead | None, fields: RawConfig = MappingProxyType({})
) -> JsonObject:
    """Return the JSON files that have to change, by name; files with the right content already are left out.

    The config gets the head's fields, and ``fields``. Where the checkpoint is quantised and the new head is in plain
    floats, the head is added to the exceptions of the quantisation config, in a form that vLLM and SGLang both match.
    """
    config = with_fields(source, {**fields, **({} if head is None else head.config_fields)})
    documents: JsonObject = {} if config == source.config else {CONFIG_FILE: config}
    if head is None:
        return documents
    groups = plain_modules({pending.key: pending.info("") for pending in head.tensors}, source.layout)
    if all(one.key in source.tensors and one.origin == (source.path, one.key) for one in head.tensors):
        unlisted = unlisted_layers(source)
        if not unlisted and unmatched_by_sglang(source) is None:
            return documents
        if any(map(source.layout.is_head_key, packed_keys(source.tensors))):
            # The head's other layers are packed, and an entry for its prefix would cover them.
            groups = dict.fromkeys(unlisted, ())
    quantised = leave_alone(config, groups, where=str(source.path))
    if quantised is not None:
        documents[CONFIG_FILE] = quantised
    if (source.path / MODELOPT_FILE).is_file():
        modelopt = leave_alone_in_modelopt(read_json(source.path / MODELOPT_FILE), groups)
        documents |= {} if modelopt is None else {MODELOPT_FILE: modelopt}
    return documents


def with_fields(source: Checkpoint, fields: RawConfig) -> JsonObject:
    """Return a checkpoint's config with other values of some fields."""
    config = copy.deepcopy(dict(source.config))
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else config
    for name, value in fields.items():
        (config if name == source.family.declaration.section else text_config)[name] = value
        if name == source.family.declaration.count and name in config:
            # A second declaration, which some engines read.
            config[name] = value
    return config


def place_file(file: Path, target: Path, link: LinkMode) -> None:
    """Hard-link a shard of weights, or copy it; every other file is copied, so that it can be edited in the export."""
    # The hub's cache contains symbolic links; the hard link has to be to the file behind them.
    real = file.resolve()
    if link == "hard" and target.suffix in (".safetensors", ".gguf"):
        # Another file system, one without links, too many links, or another user's file.
        with contextlib.suppress(OSError):
            os.link(real, target)
            return
    copy_file(real, target)


def copy_file(file: Path, target: Path) -> None:
    # shutil.copyfile writes to what is there, through a link too. A file that we have just created is no link.
    target.touch(exist_ok=False)
    shutil.copyfile(file, target)
