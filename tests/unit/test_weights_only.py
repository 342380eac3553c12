"""Families whose heads are handled as weights: found, judged, grafted, exported, and refused where they would run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints import all_tensors
from mtp_train.checkpoints.files import SINGLE_FILE
from mtp_train.cli.main import main
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import FAMILIES, Family, KeyRule, family_for, registry
from mtp_train.families.registry import HEADLESS
from mtp_train.families.spec import HeadLayer
from runs import document, tiny_mapping

_HEAD = "model.mtp.layers.{module}."
_INKLING = next(family for family in FAMILIES if family.name == "inkling")
RECORD = dataclasses.replace(
    _INKLING,
    layer=HeadLayer(why_not_run="its layers need what is not here yet"),
    trunk=dataclasses.replace(_INKLING.trunk, needs_transformers=None),
    keys=dataclasses.replace(
        _INKLING.keys,
        rules=(
            KeyRule(native=f"{_HEAD}input_proj.weight", ours="proj.weight"),
            KeyRule(native=f"{_HEAD}embed_norm.weight", ours="embed_norm.weight"),
            KeyRule(native=f"{_HEAD}hidden_norm.weight", ours="hidden_norm.weight"),
            KeyRule(native=f"{_HEAD}transformer_block.{{rest}}", ours="layer.{rest}"),
            KeyRule(native="model.mtp.chain_norm.weight", ours="final_norm.weight", optional=True),
        ),
    ),
)
"""A family before it runs: as much of a layer's rules as its weights need."""
WEIGHTS_ONLY = {RECORD.name: RECORD}
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


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [family for family in FAMILIES if family.name not in WEIGHTS_ONLY]
    monkeypatch.setattr(registry, "FAMILIES", (*others, *WEIGHTS_ONLY.values()))


def write(path: Path, family: Family, *, head: bool, seed: int) -> Path:
    """Write a checkpoint of a family with a few tensors of the released names."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.randn(4, 4, generator=generator)

    prefix = family.keys.trunk_prefixes[0]
    tensors = {family.keys.embed.format(trunk=prefix): drawn(), f"{prefix}layers.0.weight": drawn()}
    if head:
        tensors |= {f"{name}.weight": drawn() for name in SPELT_OUT[family.name]}
        tensors |= {key: drawn() for key in LAYER[family.name]}
    text: dict[str, Any] = {"model_type": family.model_types[0], "num_hidden_layers": 1}
    config: dict[str, Any] = {"architectures": ["X"], "text_config": text}
    place = text if family.declaration.section is None else config.setdefault(family.declaration.section, {})
    place[family.declaration.count] = 1
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
    assert (healthy["status"], healthy["runs_here"]) == ("healthy", f"no: {WEIGHTS_ONLY[name].layer.why_not_run}")
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
    assert WEIGHTS_ONLY[name].layer.why_not_run in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["outcome.json"]


@pytest.mark.parametrize("model_type", HEADLESS)
def test_a_model_without_heads_is_recognised(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no MTP head|external drafter|has an MTP head for it"):
        family_for({"model_type": model_type}, where="here")
    assert model_type not in {one for family in FAMILIES for one in family.model_types}


def test_a_wrapper_without_heads_is_recognised_by_its_own_name() -> None:
    config = {"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3"}}
    with pytest.raises(UnsupportedModelError, match="model_type 'kimi_k25': no engine has an MTP head for it"):
        family_for(config, where="here")
    assert family_for({**config, "model_type": "another"}, where="here").name == "deepseek_v3"


@pytest.mark.parametrize("says", ["text_config", "wrapper", "both"])
def test_a_wrapper_or_its_text_config_says_what_it_is(says: str) -> None:
    section = {"num_nextn_predict_layers": 8}
    config: dict[str, Any] = {"text_config": {}, "mtp_config": section}
    if says != "wrapper":
        config["text_config"]["model_type"] = "inkling_text"
    if says != "text_config":
        config["model_type"] = "inkling_mm_model"
    family = family_for(config, where="here")
    assert (family.name, family.declared_modules(config)) == ("inkling", 8)
