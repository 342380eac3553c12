"""The two benchmarks run, and print everything as JSON in their last line."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_train
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
    assert gpu.main(["--device", "cpu", "--parts", "rounds,decode,train", *SMALL]) == 0
    found = last_line(capsys)["parts"]
    assert [one["same"] == one["texts"] == 6 for one in found["rounds"].values()] == [True] * 4
    assert [one["graphs"] for one in found["decode"].values()] == [0, 0]
    assert found["train"]["seconds"] > 0


def test_a_config_alone_gives_random_weights_of_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(mtp_train.__file__).parent / "demo_assets" / "base" / "config.json"
    gpu = importlib.import_module("gpu")
    assert gpu.main(["--device", "cpu", "--parts", "decode,train", "--config", str(config), *SMALL]) == 0
    found = last_line(capsys)["parts"]
    assert found["decode"]["depth 3"]["tau"] == 1
    assert found["train"]["loss"] > 0


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
