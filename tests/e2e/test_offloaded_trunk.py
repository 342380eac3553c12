"""Runs whose trunk's layers come from main memory or disk leave what a run with all on the device does, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import all_tensors
from launching import head, metrics
from mtp_train.runs import evaluate_run as evaluation
from mtp_train.runs import run
from mtp_train.trunk import offload
from mtp_train.trunk.load import Trunk
from runs import LEARNS, run_quietly, tiny_recipe, write_inputs

pytestmark = pytest.mark.slow
RUN: dict[str, Any] = {
    **LEARNS,
    "evaluate__arms": ["none", "graft", "retrained", "vanilla"],
    "train__select": {"every_steps": 10, "share": 0.3},
}
# What a clock decides, and a path.
OF_ITS_OWN = {"tokens_per_second", "speedup", "speedup_ci95", "break_even_tau", "head"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("offload") / "in", num_records=48)


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run with nothing offloaded."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run_quietly(tiny_recipe(inputs, run_dir, **RUN)).reason == "done"
    return run_dir


def measured(run_dir: Path) -> Any:
    report = json.loads((run_dir / "report.json").read_text())
    arms = {
        arm: {name: value for name, value in result.items() if name not in OF_ITS_OWN}
        for arm, result in report["arms"].items()
    }
    return arms, report["lossless"], report["gate"]


@pytest.mark.parametrize(
    ("where", "more"), [("disk", {}), ("cpu", {"train__hidden_cache": {}})], ids=["disk", "cpu, hidden_cache"]
)
def test_an_offloaded_run_ends_as_any_other(
    where: str, more: dict[str, Any], inputs: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    recipe = tiny_recipe(inputs, run_dir, **RUN, **more, model__offload=where)
    offloaded: list[set[str]] = []

    def noted(trunk: Trunk, *args: Any) -> None:
        offload.offload_layers(trunk, *args)
        offloaded.append({parameter.device.type for parameter in trunk.layers.parameters()})

    for module in (run, evaluation):
        monkeypatch.setattr(module, "offload_layers", noted)
    assert run_quietly(recipe).reason == "done"
    # Both trunks; the fine-tune's twice where training lets go of its layers.
    assert offloaded == [{"meta"}] * (3 if more else 2)
    lines, expected = metrics(run_dir), metrics(whole)
    for field in ("loss", "grad_norm", "held_out_tau"):
        assert [line.get(field) for line in lines] == [line.get(field) for line in expected], field
    found, kept = head(run_dir), head(whole)
    assert all(torch.equal(found[key], value) for key, value in kept.items())
    assert measured(run_dir) == measured(whole)
    exported, others = all_tensors(run_dir / "export"), all_tensors(whole / "export")
    assert exported.keys() == others.keys()
    assert all(torch.equal(exported[key], value) for key, value in others.items())
    assert list(run_dir.glob(f"{offload.FOLDER_PREFIX}*")) == []
