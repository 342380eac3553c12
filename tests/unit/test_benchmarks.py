"""The two benchmarks run, and print everything as JSON in their last line."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

import mtp_train
from mtp_train.trunk import recurrent_kernels
from tiny import tiny_trunk

SMALL = ("--new-tokens", "3", "--repeats", "1", "--train-tokens", "16", "--seq-len", "16")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import as a script does, whose directory comes first."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "inference" / "benchmarks"))


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_decoding_on_a_cpu_is_compared_with_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("cpu").main(["--batches", "1,2", *SMALL])
    found = last_line(capsys)
    cells = [(row["dtype"], row["batch"], row["arm"]) for row in found["decoding"]]
    arms = ("plain", "speculative", "transformers")
    assert cells == [(dtype, batch, arm) for dtype in ("fp32", "bf16") for batch in (1, 2) for arm in arms]
    assert all(row["texts_of_plain"] == row["texts"] for row in found["decoding"] if row["dtype"] == "fp32")
    assert set(found["training"]) == {"fp32", "bf16"}


def test_the_parts_for_a_gpu_run(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = importlib.import_module("gpu")
    assert gpu.main(["--device", "cpu", "--parts", "decode,train", *SMALL]) == 0
    found = last_line(capsys)["parts"]
    assert [one["graphs"] for one in found["decode"].values()] == [0, 0]
    assert found["train"]["seconds"] > 0


def test_a_config_alone_gives_random_weights_of_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(mtp_train.__file__).parent / "demo_assets" / "base" / "config.json"
    gpu = importlib.import_module("gpu")
    assert gpu.main(["--device", "cpu", "--parts", "decode,train", "--config", str(config), *SMALL]) == 0
    found = last_line(capsys)["parts"]
    assert found["decode"]["depth 3"]["tau"] == 1
    assert found["train"]["loss"] > 0


def test_a_cell_that_fails_costs_no_other_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu.Bench, "decode", lambda _self: 1 / 0)
    assert gpu.main(["--device", "cpu", "--parts", "published", *SMALL]) == 1
    found = last_line(capsys)["parts"]["published"]
    assert list(found) == [f"{part} {number}" for number in (1, 2, 3) for part in ("decode", "train")]
    assert found["decode 1"] == {"failed": "ZeroDivisionError: division by zero"}
    assert found["train 3"]["seconds"] > 0


def test_a_profile_counts_kernels_and_the_gaps_between_them() -> None:
    """Two kernels that overlap, and a third one after a gap of 30 us, in two rounds."""
    spans = (("a", 100, 120), ("b", 110, 150), ("a", 180, 200))
    kind = DeviceType.CPU
    events = [
        SimpleNamespace(name=name, device_type=kind, cpu_children=[], time_range=Interval(start, end))
        for name, start, end in reversed(spans)
    ]
    caller = SimpleNamespace(device_type=kind, cpu_children=events)
    found = importlib.import_module("gpu_kernels").kernel_times([caller, *events], torch.device("cpu"), rounds=2)
    assert (found["launches"], found["span_ms_while_profiled"], found["gaps_ms"]) == (1.5, 0.05, 0.015)
    assert found["kernels"] == [["a", 1.0, 0.02], ["b", 0.5, 0.02]]


def test_a_step_can_run_recurrent_layers_in_torch_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("qwen3_5")
    module = sys.modules[type(trunk.decoder).__module__]
    chosen = recurrent_kernels.ByTensor(lambda _first: "kernel", lambda _first: "torch", None)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", chosen)
    monkeypatch.setattr(recurrent_kernels, "KERNEL_DEVICES", ("cpu",))
    found = []
    for change in (nullcontext(), *importlib.import_module("gpu_training").patches(trunk)["recurrent layers in torch"]):
        with change:
            found.append(module.torch_chunk_gated_delta_rule(torch.zeros(1)))
    assert found == ["kernel", "torch"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_round_reads_one_matrix_of_the_vocabulary(tied: bool) -> None:
    trunk = tiny_trunk("qwen3_5", tied=tied)
    of_layers = sum(one.nbytes for one in (*trunk.layers.parameters(), *trunk.decoder.norm.parameters()))
    assert importlib.import_module("gpu").bytes_read(trunk) == of_layers + trunk.lm_head_VD.nbytes


def test_no_bandwidth_is_given_for_experts_that_a_round_reads_in_part() -> None:
    assert importlib.import_module("gpu").bytes_read(tiny_trunk("qwen3_5_moe")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch detects a GPU")
def test_a_machine_without_a_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("gpu").main([])
    assert "torch detects no GPU; expected one." in capsys.readouterr().err
