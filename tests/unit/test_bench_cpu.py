"""The table of precisions on a CPU: every stage, every arm, and what ``auto`` takes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.cpu_precision import SMALL, main, measure, table
from mtp_inference.batch import WIDE_ROWS


@pytest.mark.parametrize("native", [False, True])
def test_every_stage_is_measured_and_auto_is_one_of_its_arms(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_train.trunk.precision.bf16_support", lambda _device: (native, "a stand-in"))
    found = measure(["tiny-qwen"], SMALL)
    cells = {cell["stage"]: cell for cell in found["cells"]}
    assert list(cells) == ["training", "regeneration", "plain decoding", "speculative decoding"]
    assert cells["training"]["auto"] == ("bf16" if native else "fp32")
    for stage, cell in cells.items():
        rates = cell["tokens_per_second"]
        assert list(rates) == ["fp32", "bf16", *(["widened"] if stage != "training" else [])]
        assert cell["auto_over_better"] == pytest.approx(
            rates[cell["auto"]] / max(rates["fp32"], rates["bf16"]), abs=1e-3
        )
    assert len(table([found | {"held_back": False}]).splitlines()) == 2 + len(cells)


def test_a_trunk_that_does_not_fit_in_fp32_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_train.trunk.precision.main_memory_bytes", lambda: 1000)
    monkeypatch.setattr("mtp_train.trunk.precision.bf16_support", lambda _device: (False, "a stand-in"))
    found = measure(["tiny-qwen"], SMALL)
    assert {cell["auto"] for cell in found["cells"][1:]} == {"widened"}


def test_rounds_are_measured_on_both_sides_of_the_decoder_s_limit(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rounds", "--small", "--models", "tiny-qwen"])
    cells = json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"]
    assert {cell["rows"] < WIDE_ROWS for cell in cells} == {True, False}
    assert {cell["depth"] for cell in cells} == {0, SMALL.depth}
    assert all(min(cell["bf16"], cell["widened"]) > 0 for cell in cells)


def test_a_child_process_prints_its_instruction_set_last(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--here", "--small", "--models", "tiny-qwen"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
