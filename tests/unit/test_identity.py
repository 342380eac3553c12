"""The identity of a checkpoint: its content decides, its files' status spares reading it again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from calls import calls_of
from checkpoints import save_with_head, shard
from mtp_train.checkpoints import identity
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.identity import (
    FileRecord,
    InputFiles,
    InputRecord,
    changed_files,
    checkpoint_files,
    directory_files,
    file_status,
    hash_inputs,
    read_records,
    require_same,
    write_records,
)
from mtp_train.errors import CheckpointError
from tiny import tiny_head, tiny_trunk

SILENT = Progress(disable=True)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files that are read from now on; every file counts as written long ago."""
    monkeypatch.setattr(identity, "TICK_NS", 0)
    return calls_of(monkeypatch, identity, "hash_file")


@pytest.fixture
def files(tmp_path: Path) -> InputFiles:
    (tmp_path / "x").mkdir()
    for name, text in {"head_config.json": "{}", "model.safetensors": "weights"}.items():
        (tmp_path / "x" / name).write_text(text)
    return directory_files(tmp_path / "x")


def hashed(one: InputFiles, known: Mapping[str, InputRecord] | None = None) -> dict[str, InputRecord]:
    return hash_inputs({"model.trunk": one}, known or {}, SILENT)


def test_a_checkpoint_is_what_its_results_depend_on(tmp_path: Path) -> None:
    trunk = tiny_trunk("qwen3_5")
    path = shard(save_with_head(trunk, tiny_head(trunk), tmp_path / "base"))
    counted = {
        *("config.json", "generation_config.json", "preprocessor_config.json", "modeling_own.py"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "tokenizer.model", "qwen.tiktoken", "chat_template.jinja"),
        "additional_chat_templates/tool.jinja",
    }
    others = {
        "README.md",
        "trainer_state.json",
        "training_args.bin",
        "optimizer.pt",
        "eval/results.json",
        "old.safetensors",
    }
    for name in (counted | others) - {"config.json"}:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}")
    weights = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    found = checkpoint_files(open_checkpoint(path))
    assert found.files.keys() == counted | weights | {"model.safetensors.index.json"}
    assert found.files["config.json"] == path / "config.json"


def test_what_is_unchanged_is_not_read_again(files: InputFiles, tmp_path: Path, reads: list[Any]) -> None:
    first = hashed(files)
    assert sorted(path.name for (path,) in reads) == ["head_config.json", "model.safetensors"]
    write_records(tmp_path, first)
    assert read_records(tmp_path) == first
    reads.clear()
    assert hashed(files, read_records(tmp_path)) == first
    # A directory that was moved holds the same files.
    (tmp_path / "x").rename(tmp_path / "moved")
    moved = hashed(directory_files(tmp_path / "moved"), first)["model.trunk"]
    assert (moved.contents, moved.location) == (first["model.trunk"].contents, str(tmp_path / "moved"))
    assert reads == []


@pytest.mark.parametrize("keeps", [True, False])
def test_a_touched_file_is_read_again_once_if_its_new_status_is_kept(
    keeps: bool, files: InputFiles, tmp_path: Path, reads: list[Any]
) -> None:
    write_records(tmp_path, hashed(files))
    reads.clear()
    os.utime(files.files["model.safetensors"])
    for _ in range(2):
        require_same(tmp_path, {"model.trunk": files}, SILENT, finished=False, keeps=keeps)
    assert reads == [(files.files["model.safetensors"],)] * (1 if keeps else 2)


def test_files_that_changed_are_named_in_order() -> None:
    gone, new, changed = ("f", "b", "h"), ("g", "a", "d"), ("c", "e", "i")
    recorded = dict.fromkeys((*gone, *changed), "old")
    found = dict.fromkeys((*new, *changed), "new")
    named = [f"{name} (gone)" for name in gone] + [f"{name} (new)" for name in new] + [*changed]
    assert changed_files(recorded, found) == sorted(named)


@pytest.mark.parametrize(("hashed_after_ns", "is_found"), [(0, True), (identity.TICK_NS, True), (3 * 10**9, False)])
def test_a_rewrite_within_the_tick_of_the_last_write_is_found(
    hashed_after_ns: int, is_found: bool, files: InputFiles
) -> None:
    """A rewritten file may have the same status if the clock did not advance, so a fresh status is not trusted."""
    path = files.files["model.safetensors"]
    first = hashed(files)["model.trunk"]
    path.write_text("WEIGHTS")
    size, mtime_ns, ctime_ns, inode, device = file_status(path.stat())
    sha256 = first.files["model.safetensors"].sha256
    record = FileRecord(sha256, size, mtime_ns, ctime_ns, inode, device, ctime_ns + hashed_after_ns)
    known = replace(first, files={**first.files, "model.safetensors": record})
    contents = hashed(files, {"model.trunk": known})["model.trunk"].contents
    assert changed_files(first.contents, contents) == (["model.safetensors"] if is_found else [])


def test_a_file_behind_a_link_is_its_content_and_the_name_of_a_blob_proves_nothing(
    files: InputFiles, tmp_path: Path
) -> None:
    blob = tmp_path / "blobs" / hashlib.sha256(b"weights").hexdigest()
    blob.parent.mkdir()
    files.files["model.safetensors"].rename(blob)
    files.files["model.safetensors"].symlink_to(blob)
    first = hashed(files)["model.trunk"].contents
    assert first["model.safetensors"] == blob.name
    files.files["model.safetensors"].write_text("WEIGHTS")
    assert hashed(files)["model.trunk"].contents["model.safetensors"] == hashlib.sha256(b"WEIGHTS").hexdigest()


def test_a_file_that_is_being_written_is_refused(files: InputFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.files["model.safetensors"]

    sha256 = hashlib.sha256

    def writing() -> Any:
        with path.open("a") as file:
            file.write("more")
        return sha256()

    monkeypatch.setattr(hashlib, "sha256", writing)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: is being written to; expected files that no process"
    ):
        hashed(InputFiles(files.location, {"model.safetensors": path}))


def test_a_missing_file_and_a_damaged_record_are_refused(files: InputFiles, tmp_path: Path) -> None:
    gone = InputFiles(tmp_path, {"gone.json": tmp_path / "gone.json"})
    with pytest.raises(CheckpointError, match=r"gone\.json: cannot be read \(No such file or directory\); expected"):
        hashed(gone)
    assert read_records(tmp_path) == {}
    for text in ("{}", '{"inputs": {"a": {"files": {}}}}', '{"inputs": []}'):
        (tmp_path / "inputs.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"inputs\.json: cannot be read \(.*; expected the record"):
            read_records(tmp_path)
