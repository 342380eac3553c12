"""LoRA on the head through whole runs: what is exported has the names of any head, on one process or two."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launching import ROOT, head, metrics, outcome, start
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import GateRefusedError
from mtp_train.heads.lora import is_lora
from runs import LEARNS, run_quietly, tiny_recipe, write_inputs, write_recipe

pytestmark = pytest.mark.slow
FAMILY = "glm4_moe"
with_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed: not installed")
PROGRAM = ROOT / "tests" / "cpu_shards.py"
RUN: dict[str, Any] = {**LEARNS, "head__lora": {"r": 8, "alpha": 16}}
SHORT = {
    **RUN,
    "train__max_steps": 6,
    "evaluate__prompts": 2,
    "gate__confidence": 0.6,
    "evaluate__max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("lora") / "in", FAMILY, num_records=48)


@pytest.fixture(scope="module")
def one_process(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    with contextlib.suppress(GateRefusedError):
        run_quietly(tiny_recipe(inputs, run_dir, **SHORT))
    return run_dir


def test_a_head_that_learns_by_lora_is_exported_like_any_other(inputs: Path, tmp_path: Path) -> None:
    assert run_quietly(tiny_recipe(inputs, tmp_path / "run", **RUN)).reason == "done"
    base, exported = open_checkpoint(inputs / "base"), open_checkpoint(tmp_path / "run" / "export")
    assert exported.tensors.keys() == base.tensors.keys()
    trained, start_head = head(tmp_path / "run"), {key: base.read(key) for key in head(tmp_path / "run")}
    frozen = {key for key, value in trained.items() if torch.equal(value, start_head[key])}
    assert all(value.ndim == 1 or key.endswith("mlp.gate.weight") for key, value in trained.items() if key in frozen)
    assert all(value.ndim > 1 for key, value in trained.items() if key not in frozen)
    state = max((tmp_path / "run" / "state").glob("step-*"))
    assert all(map(is_lora, load_file(state / "head.safetensors")))


@pytest.mark.parametrize(
    "machine",
    [
        "cpu_ddp.yaml",
        "fsdp2.yaml",
        *(pytest.param(name, marks=with_deepspeed) for name in ("zero2.yaml", "zero3.yaml")),
    ],
)
def test_two_processes_learn_what_one_does(machine: str, inputs: Path, one_process: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, run_dir, **SHORT)
    on_cpu = {} if machine.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}
    ended = start(machine, PROGRAM, recipe, "--json", flags=("--num_processes", "2"), **on_cpu)
    assert outcome(run_dir)["stage"] == "done", ended.stderr[-2000:]
    lines, expected = metrics(run_dir), metrics(one_process)
    assert {line["world_size"] for line in lines} == {2}
    for field in ("loss", "grad_norm"):
        assert [line[field] for line in lines] == pytest.approx([line[field] for line in expected], abs=1e-4), field
    for found, kept in ((head(run_dir), head(one_process)), (state(run_dir), state(one_process))):
        assert found.keys() == kept.keys()
        for key, value in kept.items():
            torch.testing.assert_close(found[key], value, atol=2e-3, rtol=0, msg=lambda text, at=key: at + text)


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last resume state, and their moments."""
    directory = max((run_dir / "state").glob("step-*"))
    return {**load_file(directory / "head.safetensors"), **load_file(directory / "optimizer.safetensors")}
