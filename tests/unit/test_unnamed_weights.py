"""Weight files that a checkpoint does not name are no part of it, and one directory contains one model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import all_tensors, holds, same, save_tensors, shard
from json_files import read_json, write_json
from left_over import OLD_SHARDS, changed, head_of, keys_outside_of_the_index, old_shards
from mtp_train import export, graft, inspect
from mtp_train.checkpoints.export import place_file
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from mtp_train.cli.main import main
from mtp_train.errors import CheckpointError
from runs import Capture, paste


def without_head(path: Path, file: str) -> dict[str, torch.Tensor]:
    """Shard a checkpoint, and move its head to a file that the index does not name; return the head."""
    head = head_of(path)
    trunk = {key: value for key, value in load_file(path / SINGLE_FILE).items() if key not in head}
    save_tensors(trunk, path / SINGLE_FILE)
    save_tensors(head, shard(path) / file)
    return head


@pytest.mark.parametrize("file", ["mtp.safetensors", "model_extra_tensors.safetensors"])
def test_a_head_that_the_index_does_not_name_is_named_and_replaced(
    file: str, base: Path, saved: Path, out: Path
) -> None:
    head = without_head(base, file)
    found = inspect(base)
    assert found.status == "declared_but_missing"
    assert found.unnamed_weights == (f"{file} (15 tensors, 15 of a head)",)
    assert f"no part of the checkpoint: {file} (15 tensors, 15 of a head)" in str(found)
    assert (found.cure or "").startswith(f"mtp-train graft {base} --from BASE")
    with pytest.raises(CheckpointError, match=rf"{file} has some and is no part of the checkpoint"):
        export(base, out)
    save_tensors(changed(head), base / file)
    notes = "\n".join(graft(base, saved / "base", out).notes)
    assert f"Left out, as no part of the checkpoint: {file} (15 tensors, 15 of a head)." in notes
    written = all_tensors(out)
    assert holds(written, head)
    assert not (out / file).exists()


def test_a_stray_file_beside_a_healthy_head_does_not_travel(base: Path, tmp_path: Path) -> None:
    stray = "model_extra_tensors.safetensors"
    save_tensors(changed(head_of(base)), base / stray)
    shard(base)
    found = inspect(base)
    assert found.status == "healthy"
    assert found.serves["llama.cpp"] == f"no: also reads {stray}, which is no part of the checkpoint"
    assert found.serves["vllm"].startswith("vllm serve")
    assert found.cure == f"mtp-train export {base} --out {base}-mtp"
    out = paste(found.cure)
    assert not (out / stray).exists()
    assert inspect(out).cure is None


def test_keys_outside_of_the_index_are_named_and_listed_by_copies(base: Path, saved: Path, tmp_path: Path) -> None:
    head = head_of(base)
    keys_outside_of_the_index(base, head)
    found = inspect(base)
    assert (found.status, sorted(found.unlisted_keys)) == ("healthy", sorted(head))
    assert found.serves["llama.cpp"].startswith("no: its converter refuses tensors that the index does not list")
    export(base, tmp_path / "out")
    graft(base, saved / "base", tmp_path / "grafted")
    for out in ("out", "grafted"):
        assert read_json(tmp_path / out / INDEX_FILE)["weight_map"].keys() >= head.keys()
        assert inspect(tmp_path / out).cure is None


# One directory, one model


def test_a_single_file_beside_other_shards_is_refused(base: Path, capfd: Capture) -> None:
    content = (base / SINGLE_FILE).read_bytes()
    (shard(base) / SINGLE_FILE).write_bytes(content)
    assert main(["inspect", str(base)]) == 2
    message = capfd.readouterr().err
    assert f"{base}: contains two sets of weights, model.safetensors and the 3 file(s) of {INDEX_FILE}" in message


def test_a_single_file_that_the_index_names_is_a_shard(base: Path, out: Path) -> None:
    """As AutoRound writes it: the head in a second file, and an index of both."""
    expected = all_tensors(base)
    head = head_of(base)
    save_file({key: value for key, value in expected.items() if key not in head}, base / SINGLE_FILE)
    save_file(head, base / "model_extra_tensors.safetensors")
    weight_map = {key: "model_extra_tensors.safetensors" if key in head else SINGLE_FILE for key in expected}
    write_json(base / INDEX_FILE, {"weight_map": weight_map})
    assert inspect(base).status == "healthy"
    export(base, out)
    assert same(all_tensors(out), expected)
    # transformers would read it alone.
    assert not (out / SINGLE_FILE).exists()


@pytest.mark.parametrize("index", ["of itself", "of shards that are gone"])
def test_an_index_that_adds_nothing_leaves_the_single_file_the_checkpoint(index: str, base: Path) -> None:
    file = SINGLE_FILE if index == "of itself" else OLD_SHARDS[0]
    write_json(base / INDEX_FILE, {"weight_map": dict.fromkeys(all_tensors(base), file)})
    assert open_checkpoint(base).index is None


def test_names_of_left_over_shards_are_not_used(base: Path, finetune: Path, saved: Path, out: Path) -> None:
    expected = all_tensors(finetune)
    for path in (base, finetune):
        old_shards(path, head_of(saved / "base"))
    graft(finetune, saved / "base", out)
    written = all_tensors(out)
    assert holds(written, expected)
    names = {file.name for file in out.glob("*.safetensors")}
    assert not names & {file.name for file in finetune.iterdir()}


# Writing


@pytest.mark.parametrize("link", ["hard", "copy"])
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_target_that_exists_is_never_written(link: str, suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"a{suffix}"
    mine = tmp_path / f"mine{suffix}"
    source.write_bytes(b"a")
    mine.write_bytes(b"mine")
    for name, make in (("linked", os.link), ("symlinked", os.symlink)):
        make(mine, tmp_path / f"{name}{suffix}")
        with pytest.raises(FileExistsError):
            place_file(source, tmp_path / f"{name}{suffix}", link)  # type: ignore[arg-type]
    assert mine.read_bytes() == b"mine"
