from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import base_and_finetune, holds
from json_files import read_json, write_json
from mtp_train.checkpoints.artifact import HEAD_CONFIG_FILE, WEIGHTS_FILE, Artifact, load_artifact, save_artifact
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.heads.build import build_head, graft_artifact_plan, graft_plan
from mtp_train.heads.diagnose import text_config_of
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk


def make_artifact(directory: Path, family_name: str = "qwen3_5") -> tuple[Artifact, Checkpoint]:
    base, finetune = (open_checkpoint(path) for path in base_and_finetune(directory, family_name))
    plan = graft_plan(finetune, base, "sglang")
    notes = {"trunk": "finetune", "steps": 3, "nested": {"a": [1, None]}}
    return Artifact(**vars(plan), num_depths=3, notes=notes), finetune


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_artifact(make_artifact(tmp_path)[0], tmp_path / "head")
    return tmp_path / "head"


def edit_config(path: Path, **changes: Any) -> None:
    config = read_json(path / HEAD_CONFIG_FILE)
    removed = {key for key, value in changes.items() if value is None}
    write_json(path / HEAD_CONFIG_FILE, {key: value for key, value in (config | changes).items() if key not in removed})


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_saved_head_and_its_graft_are_the_head_of_its_checkpoint(family_name: str, tmp_path: Path) -> None:
    artifact, finetune = make_artifact(tmp_path, family_name)
    save_artifact(artifact, tmp_path / "head")
    loaded = load_artifact(tmp_path / "head")
    assert (loaded.num_depths, loaded.notes) == (artifact.num_depths, artifact.notes)
    for found in (loaded, graft_artifact_plan(finetune, loaded, tmp_path / "head", "sglang")):
        for field in ("family", "layout", "num_modules", "convention"):
            assert getattr(found, field) == getattr(artifact, field), field
        assert found.head.shared_keys == artifact.head.shared_keys
        assert found.head.config_fields == artifact.head.config_fields
        for saved, expected in zip(found.head.tensors, artifact.head.tensors, strict=True):
            assert (saved.key, saved.dtype) == (expected.key, expected.dtype)
            assert torch.equal(saved.load(), expected.load())
    head = build_head(loaded, text_config_of(finetune), dtype=torch.float32)
    expected_state = tiny_head(tiny_trunk(family_name)).state_dict()
    assert holds(expected_state, head.state_dict())
    assert head.convention == artifact.family.convention("sglang")


def test_a_graft_of_a_head_with_another_wiring_is_refused(tmp_path: Path) -> None:
    artifact, finetune = make_artifact(tmp_path, "glm4_moe")
    with pytest.raises(CheckpointError, match=r"wiring sglang, and head.convention is vllm; .* sglang\."):
        graft_artifact_plan(finetune, artifact, tmp_path / "head", "vllm")


def test_loading_reads_no_weight_before_it_is_needed(saved: Path) -> None:
    loaded = load_artifact(saved)
    (saved / WEIGHTS_FILE).unlink()
    with pytest.raises(FileNotFoundError):
        loaded.head.tensors[0].load()


@pytest.mark.parametrize("version", [2, "1", None])
def test_another_format_version_is_refused(version: int | str | None, saved: Path) -> None:
    edit_config(saved, format_version=version)
    with pytest.raises(CheckpointError, match=rf"format_version {version!r}; expected 1\. Write the head again"):
        load_artifact(saved)


@pytest.mark.parametrize("field", ["trunk_prefix", "num_modules", "convention", "shared_keys", "config_fields"])
def test_a_missing_field_is_named(field: str, saved: Path) -> None:
    edit_config(saved, **{field: None})
    with pytest.raises(
        CheckpointError, match=rf"head_config\.json: {field} is missing; expected .* Write the head again"
    ):
        load_artifact(saved)


@pytest.mark.parametrize("damage", ["missing", "reshaped"])
def test_weights_that_do_not_make_a_head_of_the_trunk_are_refused(damage: str, tmp_path: Path) -> None:
    """A head of a wider sibling, or one with a tensor taken out, is the user's input: it ends in a message."""
    artifact, finetune = make_artifact(tmp_path)
    save_artifact(artifact, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / WEIGHTS_FILE)
    fused = tensors.pop("mtp.fc.weight")
    if damage == "reshaped":
        tensors["mtp.fc.weight"] = torch.cat([fused, fused])
    save_file(tensors, tmp_path / "head" / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        build_head(load_artifact(tmp_path / "head"), text_config_of(finetune), dtype=torch.float32)


def test_a_reduced_vocabulary_is_kept(tmp_path: Path) -> None:
    artifact, _ = make_artifact(tmp_path)
    assert load_artifact(saved_as(tmp_path / "all", artifact)).draft_vocab is None
    some = dataclasses.replace(artifact, draft_vocab=torch.tensor([2, 3, 5], dtype=torch.int32))
    path = saved_as(tmp_path / "some", some)
    loaded = load_artifact(path).draft_vocab
    assert loaded is not None
    assert loaded.tolist() == [2, 3, 5]


def saved_as(path: Path, artifact: Artifact) -> Path:
    save_artifact(artifact, path)
    return path
