"""Runs on trunks whose layers come from main memory, bit for bit as on the device, and on packed trunks."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import all_tensors, same, set_fields
from json_files import read_json
from launching import head, metrics, without_speed
from mtp_train.runs import pipeline
from mtp_train.trunk.load import Trunk
from runs import LEARNS, Capture, document, passed_report, refusal, tiny_recipe, write_inputs, write_recipe

RUN: dict[str, Any] = {
    **LEARNS,
    "evaluate__arms": ["none", "graft", "retrained", "vanilla"],
    "train__select": {"every_steps": 10, "share": 0.3},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("offload") / "in", num_records=48)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run with nothing offloaded."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert pipeline.run(tiny_recipe(inputs, run_dir, **RUN)).reason == "done"
    return run_dir


def measured(run_dir: Path) -> Any:
    report = json.loads((run_dir / "report.json").read_text().replace(str(run_dir), "RUN"))
    return without_speed([report[part] for part in ("arms", "lossless", "gate")])


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"train__hidden_cache": {}}], ids=["alone", "hidden_cache"])
def test_an_offloaded_run_ends_as_any_other(
    more: dict[str, Any], inputs: Path, whole: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = new_run
    recipe = tiny_recipe(inputs, run_dir, **RUN, **more, model__offload="cpu")
    offloaded: list[set[str]] = []

    offload_layers = Trunk.offload_layers

    def noted(trunk: Trunk, device: torch.device) -> None:
        offload_layers(trunk, device)
        offloaded.append({parameter.device.type for parameter in trunk.layers.parameters()})

    monkeypatch.setattr(Trunk, "offload_layers", noted)
    assert pipeline.run(recipe).reason == "done"
    # Both trunks; the fine-tune's twice where training lets go of its layers.
    assert offloaded == [{"meta"}] * (3 if more else 2)
    lines = metrics(run_dir)
    expected = metrics(whole)
    for field in ("loss", "grad_norm", "held_out_tau"):
        assert [line.get(field) for line in lines] == [line.get(field) for line in expected], field
    assert measured(run_dir) == measured(whole)
    assert same(head(run_dir), head(whole))
    assert same(all_tensors(run_dir / "export"), all_tensors(whole / "export"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("packed") / "in", "glm4_moe")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: not installed")
def test_a_packed_trunk_is_trained_on_and_exported_as_it_was(mixture: Path, new_run: Path) -> None:
    recipe = tiny_recipe(mixture, new_run, **LEARNS, model__quantization="8bit")
    assert pipeline.run(recipe).reason == "done"
    passed_report(new_run, "graft")
    finetune = all_tensors(mixture / "finetune")
    exported = all_tensors(new_run / "export")
    assert finetune.keys() < exported.keys()
    assert all(exported[key].equal(value) for key, value in finetune.items())
    assert "quantization_config" not in read_json(new_run / "export" / "config.json")


def test_check_counts_packed_weights_and_refuses_packed_checkpoints(
    mixture: Path, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", mixture, new_run)
    sizes = [
        document(["check", recipe, f"model.quantization={bits}"], capfd)["memory"]["trunk_bytes"]
        for bits in ("null", "8bit")
    ]
    assert sizes[0] > sizes[1]
    quantised = Path(shutil.copytree(mixture / "finetune", tmp_path / "fp8"))
    set_fields(quantised, {"quantization_config": {"quant_method": "fp8"}})
    argv = ["check", recipe, f"model.trunk={quantised}", "model.quantization=8bit"]
    assert "quantised with fp8 already, while model.quantization is 8bit" in refusal(argv, capfd)
    document([*argv[:-1], "model.quantization=null"], capfd)
