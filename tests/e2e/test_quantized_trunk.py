"""A run whose trunk bitsandbytes packs: it learns, drafts without loss, and exports the checkpoint's own bytes."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from checkpoints import all_tensors, set_fields
from runs import LEARNS, document, refusal, run_quietly, tiny_recipe, write_inputs, write_recipe

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("packed") / "in", "glm4_moe")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: not installed")
def test_a_packed_trunk_is_trained_on_and_exported_as_it_was(inputs: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(inputs, tmp_path / "run", **LEARNS, model__quantization="8bit")
    assert run_quietly(recipe).reason == "done"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
    finetune, exported = all_tensors(inputs / "finetune"), all_tensors(tmp_path / "run" / "export")
    assert finetune.keys() < exported.keys()
    assert all(exported[key].equal(value) for key, value in finetune.items())
    assert "quantization_config" not in json.loads((tmp_path / "run" / "export" / "config.json").read_text())


def test_check_counts_packed_weights_and_refuses_packed_checkpoints(
    inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run")
    sizes = [
        document(["check", recipe, f"model.quantization={bits}"], capfd)["memory"]["trunk_bytes"]
        for bits in ("null", "8bit")
    ]
    assert sizes[0] > sizes[1]
    quantised = Path(shutil.copytree(inputs / "finetune", tmp_path / "fp8"))
    set_fields(quantised, {"quantization_config": {"quant_method": "fp8"}})
    argv = ["check", recipe, f"model.trunk={quantised}", "model.quantization=8bit"]
    assert "quantised with fp8 already, while model.quantization is 8bit" in refusal(argv, capfd)
