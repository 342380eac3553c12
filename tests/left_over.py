"""Checkpoint directories as users have them: with weight files that the checkpoint does not name, and hub caches."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load_file

from checkpoints import Tensors, save_tensors, shard
from json_files import read_json, write_json
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE

OLD_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def head_of(path: Path) -> Tensors:
    """Return the head's tensors of a single-file Qwen3.5 checkpoint."""
    return {key: value for key, value in load_file(path / SINGLE_FILE).items() if key.startswith("mtp.")}


def changed(tensors: Tensors) -> Tensors:
    """Return other values under the same keys."""
    return {key: value * 0.9 for key, value in tensors.items()}


def head_outside_of_the_index(path: Path, head: Tensors) -> Path:
    """Shards, and another head in a file that no index names, under the name that an export chooses."""
    save_tensors(changed(head), shard(path) / "model-mtp.safetensors")
    return path


def keys_outside_of_the_index(path: Path, head: Tensors) -> Path:
    """Shards of which the index lists the trunk's tensors alone."""
    index = read_json(shard(path) / INDEX_FILE)
    index["weight_map"] = {key: file for key, file in index["weight_map"].items() if key not in head}
    write_json(path / INDEX_FILE, index)
    return path


def old_shards(path: Path, head: Tensors) -> Path:
    """A single file, and two shards of an earlier save with another head, without their index."""
    halves: list[Tensors] = [{}, changed(head)]
    for number, (key, value) in enumerate(changed(load_file(path / SINGLE_FILE)).items()):
        halves[number % 2].setdefault(key, value)
    for name, half in zip(OLD_SHARDS, halves, strict=True):
        save_tensors(half, path / name)
    return path


def one_old_shard(path: Path, head: Tensors) -> Path:
    """A single file, and one shard of an earlier save, under the name that an export gives its new shard."""
    save_tensors(changed(head), path / OLD_SHARDS[1])
    return path


LAYOUTS: Mapping[str, Callable[[Path, Tensors], Path]] = {
    one.__name__: one for one in (head_outside_of_the_index, keys_outside_of_the_index, old_shards, one_old_shard)
}


def into_hub_cache(path: Path, cache: Path, revision: str = "0123abc") -> Path:
    """Store a checkpoint as the hub's cache does: blobs by hash, and a snapshot of links to them."""
    repo = cache / "models--someone--model"
    snapshot = repo / "snapshots" / revision
    (repo / "blobs").mkdir(parents=True)
    for file in sorted(path.rglob("*")):
        if file.is_file():
            name = hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copyfile(file, repo / "blobs" / name)
            link = snapshot / file.relative_to(path)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(repo / "blobs" / name, link.parent))
    return snapshot
