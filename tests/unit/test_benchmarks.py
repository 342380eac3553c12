"""The benchmarks run, and print everything as JSON in their last line."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

import mtp_train
from mtp_train.upstream.compiled import replace_forwards, row_norms
from repository import REPOSITORY
from tiny import tiny_trunk

DEMO = Path(mtp_train.__file__).parent / "demo_assets" / "base" / "config.json"
CEILINGS = {"plain_round": 244, "round_3_drafts": 465, "step": 1038}
"""Launches of the demo, compiled as on a GPU, with the oldest torch and transformers or the newest. Lower one when a
change saves launches."""
SMALL = ("--new-tokens", "3", "--repeats", "1", "--train-tokens", "16", "--seq-len", "16")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import as a script does, whose directory comes first."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "inference" / "benchmarks"))


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


def test_a_config_alone_gives_random_weights_of_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = importlib.import_module("gpu")
    assert gpu.main(["--device", "cpu", "--parts", "decode,train", "--config", str(DEMO), *SMALL]) == 0
    found = last_line(capsys)["parts"]
    assert found["decode"]["depth 3"]["tau"] == 1
    assert found["train"]["loss"] > 0


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


def test_launches_of_rounds_and_of_a_step_stay_below_their_ceilings(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("count").main(["--config", str(DEMO), "--train-tokens", "2048"])
    found = last_line(capsys)
    launches = {name: found[name]["launches"] for name in CEILINGS}
    assert all(launches[name] <= ceiling for name, ceiling in CEILINGS.items()), launches
    for row in (found[name] for name in CEILINGS):
        assert sum(part["launches"] for part in row["by_module"].values()) == row["launches"]
    # One product of the trunk's states with the output matrix, and two of each depth's: logits and their gradient.
    products = 2 * 2048 * 2048 * 128 * (1 + 2 * 3)
    assert found["step"]["by_module"]["loss"]["teraflop"] == pytest.approx(products / 1e12, rel=1e-3)
    assert found["round_3_drafts"]["by_module"]["drafting: lm_head"]["launches"] == 3


@pytest.mark.parametrize(
    ("module", "launches", "nbytes", "flop"),
    [
        # Input, weight and output.
        (nn.Linear(8, 4, bias=False), 1, 2 * (2 * 8 + 4 * 8 + 2 * 4), 2 * 2 * 8 * 4),
        # To fp32, pow, mean, plus eps, rsqrt, times it; the weight to fp32, plus 1; times it, to bf16.
        (Qwen3_5RMSNorm(8), 10, 96 + 128 + 72 + 16 + 16 + 136 + 48 + 64 + 160 + 96, 0),
    ],
    ids=["linear", "norm"],
)
def test_a_layer_counts_what_it_launches_and_moves(module: nn.Module, launches: int, nbytes: int, flop: int) -> None:
    counting = importlib.import_module("count").Counting(nn.Identity())
    given = torch.empty(2, 8, device="meta", dtype=torch.bfloat16)
    module.to("meta", torch.bfloat16)
    with counting.active(), torch.no_grad():
        module(given)
    (part,) = counting.parts.values()
    assert part == {"launches": launches, "nbytes": nbytes, "flop": flop}
    assert counting.products == (part if flop else {})


def test_a_compiled_norm_counts_the_kernels_that_inductor_makes_of_it() -> None:
    counting = importlib.import_module("count").Counting(nn.Identity())
    norm = Qwen3_5RMSNorm(8).to("meta")
    given = torch.empty(2, 8, device="meta", requires_grad=True)
    with counting.compiling(), counting.active():
        replace_forwards(row_norms([norm]))
        counting.part = "forward"
        normed = norm(given)
        counting.part = "backward"
        normed.backward(given.detach())
    # The rows twice, for their mean and for the norm, the weight and the output; what the backward pass needs is kept.
    assert counting.parts["forward: norm"]["launches"] == 1
    assert counting.parts["forward: norm"]["nbytes"] == pytest.approx(64 + 64 + 32 + 64, abs=32)
    assert counting.parts["backward"]["launches"] == 2
    assert norm.weight.grad is not None


def test_the_page_of_served_speeds_has_the_figures_that_its_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("served").main()
    rows = json.loads(capsys.readouterr().out)
    page = (REPOSITORY / "inference" / "benchmarks" / "served.md").read_text()
    assert len(rows) == 16
    for row in rows:
        if row["against"] == "none":
            speed = "{:.2f} [{:.2f}, {:.2f}]".format(*row["speed"])
            assert (f"**{speed}**" in page) == row["holm"], row
            assert speed in page, row
