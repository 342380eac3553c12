"""A trained trunk goes back into the layout it came from, whatever transformers calls its parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from checkpoints import base_and_finetune, fuse_experts, same, shard, split, wrap_as_vision_language
from mtp_train import inspect
from mtp_train.errors import CheckpointError
from mtp_train.families import FAMILIES
from mtp_train.job.sft.fine_tune import write_tuned
from mtp_train.trunk.load import load_trunk
from mtp_train.weights.files import SINGLE_FILE, open_checkpoint
from tiny import ALL_FAMILIES

TRAINED = [one.name for one in FAMILIES if one.name in ALL_FAMILIES and one.trunk.stand_in is None]
# A head beside the trunk, one after it, names of a release's own, a table that does not learn.
TELLING = {"qwen3_5", "glm4_moe", "nemotron_h", "deepseek_v4"}


def trained(base: Path, out: Path) -> dict[str, torch.Tensor]:
    """Load a model, move all of its weights and save it; return what it then has."""
    model = load_trunk(base, open_checkpoint(base).family, dtype=torch.float32).causal_lm
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    model.save_pretrained(out)
    return dict(model.state_dict())


def written(base: Path, saved: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return what a model has that is loaded from the base's layout."""
    write_tuned(open_checkpoint(base), saved, out, link="hard", progress=Progress(disable=True))
    return dict(load_trunk(out, open_checkpoint(out).family, dtype=torch.float32).causal_lm.state_dict())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TELLING else pytest.mark.slow) for name in TRAINED]
)
def test_every_familys_trunk_is_written_into_the_layout_it_came_from(name: str, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, name)
    expected = trained(base, tmp_path / "saved")
    assert same(written(base, tmp_path / "saved", tmp_path / "out"), expected)
    assert same(split(tmp_path / "out")[1], split(base)[1])
    assert inspect(tmp_path / "out", base).stale


@pytest.mark.parametrize("kind", ["wrapped", "sharded", "tied", "stacked"])
def test_so_it_is_where_a_release_stores_it_in_another_way(kind: str, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "glm4_moe" if kind == "stacked" else "qwen3_5", tied=kind == "tied")
    change = {"wrapped": wrap_as_vision_language, "sharded": shard, "stacked": fuse_experts, "tied": lambda path: path}
    change[kind](base)
    expected = trained(base, tmp_path / "saved")
    assert same(written(base, tmp_path / "saved", tmp_path / "out"), expected)
    names = [sorted(path.name for path in (tmp_path / place).glob("*.safetensors")) for place in ("out", "base")]
    assert names[0] == names[1]


def test_values_are_rounded_once_to_what_the_release_stores(tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5")
    tensors = load_file(base / SINGLE_FILE)
    save_file({key: value.bfloat16() for key, value in tensors.items()}, base / SINGLE_FILE, {"format": "pt"})
    expected = trained(base, tmp_path / "saved")
    found = written(base, tmp_path / "saved", tmp_path / "out")
    assert same(found, {name: value.bfloat16().float() for name, value in expected.items()})
    assert {value.dtype for value in split(tmp_path / "out")[0].values()} == {torch.bfloat16}


def test_a_save_that_lacks_a_part_of_the_trunk_is_refused(tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5")
    trained(base, tmp_path / "saved")
    file = tmp_path / "saved" / SINGLE_FILE
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"saved: has no tensor for model\.layers\.0\.mlp\.up_proj"):
        written(base, tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()
