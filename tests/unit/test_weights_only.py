"""Families whose heads are handled as weights: found, judged, grafted, exported, and refused where they would run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints import all_tensors
from mtp_train.cli import main
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import FAMILIES, Family, family_for
from mtp_train.families.headless import HEADLESS
from mtp_train.weights.files import SINGLE_FILE, open_checkpoint
from runs import document, tiny_mapping

WEIGHTS_ONLY = {family.name: family for family in FAMILIES if family.borrowed is None}
# The rest of the layer stands for any tensors a release has there.
LAYER = {
    "inkling": (
        "model.mtp.layers.0.transformer_block.attn.wq_du.weight",
        "model.mtp.chain_norm.weight",
    ),
}
SPELT_OUT = {
    "inkling": [f"model.mtp.layers.0.{name}" for name in ("input_proj", "embed_norm", "hidden_norm")],
}


def write(path: Path, family: Family, *, head: bool, seed: int) -> Path:
    """Write a checkpoint of a family with a few tensors of the released names."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.randn(4, 4, generator=generator)

    prefix = family.trunk_prefixes[0]
    tensors = {family.embed_key.format(trunk=prefix): drawn(), f"{prefix}layers.0.weight": drawn()}
    if head:
        tensors |= {f"{name}.weight": drawn() for name in SPELT_OUT[family.name]}
        tensors |= {key: drawn() for key in LAYER[family.name]}
    text: dict[str, Any] = {"model_type": family.model_types[0], "num_hidden_layers": 1}
    config: dict[str, Any] = {"architectures": ["X"], "text_config": text}
    place = text if family.count.section is None else config.setdefault(family.count.section, {})
    place[family.count.name] = 1
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_a_stripped_checkpoint_gets_its_head_back_bit_for_bit(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = write(tmp_path / "base", WEIGHTS_ONLY[name], head=True, seed=1)
    finetune = write(tmp_path / "finetune", WEIGHTS_ONLY[name], head=False, seed=2)
    healthy = document(["inspect", base], capfd)
    assert (healthy["status"], healthy["runs_here"]) == ("healthy", f"no: {WEIGHTS_ONLY[name].why_not_run}")
    stripped = document(["inspect", finetune, "--base", base], capfd)
    assert stripped["status"] == "declared_but_missing"
    assert set(stripped["missing_keys"]) >= {f"{key}.weight" for key in SPELT_OUT[name]}
    assert stripped["cure"].startswith("mtp-train graft")
    document(["graft", finetune, "--from", base, "--out", tmp_path / "out"], capfd)
    grafted = document(["inspect", tmp_path / "out", "--base", base], capfd)
    assert (grafted["status"], grafted["stale"]) == ("healthy", True)
    written, tuned, original = (all_tensors(path) for path in (tmp_path / "out", finetune, base))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], (tuned if key in tuned else original)[key]) for key in written)


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
@pytest.mark.parametrize("lost", ["spelt_out", "layer"])
def test_a_head_that_lacks_a_part_is_partial(
    name: str, lost: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "base", WEIGHTS_ONLY[name], head=True, seed=1)
    tensors = all_tensors(path)
    gone = [f"{SPELT_OUT[name][1]}.weight"] if lost == "spelt_out" else list(LAYER[name])
    save_file({key: value for key, value in tensors.items() if key not in gone}, path / SINGLE_FILE)
    found = document(["inspect", path], capfd)
    assert found["status"] == "partial"
    assert found["missing_keys"] == (gone if lost == "spelt_out" else ["module 0: its layer"])


@pytest.mark.parametrize("name", WEIGHTS_ONLY)
def test_training_is_refused_with_the_reason(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "base", WEIGHTS_ONLY[name], head=True, seed=1)
    write(tmp_path / "finetune", WEIGHTS_ONLY[name], head=False, seed=2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tiny_mapping(tmp_path, tmp_path / "run")))
    assert main(["run", str(recipe)]) == 2
    assert WEIGHTS_ONLY[name].why_not_run in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["outcome.json"]


@pytest.mark.parametrize("model_type", HEADLESS)
def test_a_model_without_heads_is_recognised(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no MTP head|external drafter"):
        family_for({"model_type": model_type}, where="here")
    assert model_type not in {one for family in FAMILIES for one in family.model_types}


def test_the_text_model_of_a_wrapper_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "base", WEIGHTS_ONLY["inkling"], head=True, seed=1)
    assert open_checkpoint(path).family.declared_modules(json.loads((path / "config.json").read_text())) == 1
