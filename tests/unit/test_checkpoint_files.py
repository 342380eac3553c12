from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import save_with_head, set_fields, shard
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from mtp_train.checkpoints.locations import locate_checkpoint
from mtp_train.errors import CheckpointError, UnsupportedModelError
from tiny import tiny_head, tiny_trunk


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trunk = tiny_trunk("qwen3_5")
    return save_with_head(trunk, tiny_head(trunk), tmp_path / "checkpoint")


def test_an_index_that_lists_a_tensor_its_shard_lacks_is_refused(checkpoint: Path) -> None:
    shard(checkpoint)
    index = json.loads((checkpoint / INDEX_FILE).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    (checkpoint / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists model\.ghost\.weight .* which does not contain it"):
        open_checkpoint(checkpoint)


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / SINGLE_FILE).rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights are pickles \(pytorch_model\.bin\), which can run code"):
        open_checkpoint(checkpoint)


def test_a_directory_without_weights_or_config_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"no weights; expected model\.safetensors"):
        open_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory; expected a checkpoint directory or a hub id"):
        open_checkpoint(tmp_path / "nowhere")


def test_an_architecture_without_a_known_layout_is_refused(checkpoint: Path) -> None:
    set_fields(checkpoint, {"model_type": "gpt2"})
    opened = open_checkpoint(checkpoint)
    with pytest.raises(UnsupportedModelError, match=r"model_type 'gpt2', an architecture without a known head layout"):
        opened.family.name  # noqa: B018


def test_a_hub_name_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="no-such-owner/no-such-model: neither a local directory nor a hub model"):
        locate_checkpoint("no-such-owner/no-such-model")
