"""The main job on tiny random models: from a fine-tune without its head to an exported checkpoint."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.identity import RECORD_FILE
from mtp_train.checkpoints.native import NativeHead
from mtp_train.cli.main import main
from mtp_train.errors import GateRefusedError, RecipeError
from mtp_train.evaluation.results import UNJUDGED_SENTENCE
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import run as run_module
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.inputs import gather_inputs
from mtp_train.runs.run import require_room
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.train.log import read_metrics
from mtp_train.train.machine import Device
from mtp_train.trunk.load import load_trunk
from runs import LEARNS, copy_run, run_quietly, tiny_recipe, write_inputs


def test_a_run_without_a_gate_exports_an_unjudged_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_train.runs.pipeline.evaluate_run", None)
    inputs, run_dir = write_inputs(tmp_path / "in"), tmp_path / "run"
    recipe = tiny_recipe(inputs, run_dir, gate={"enabled": False}, evaluate__prompts=1)
    outcome = run_quietly(recipe)
    assert (outcome.exit_code, outcome.reason, outcome.stage) == (0, "unjudged", "done")
    assert outcome.message.startswith(UNJUDGED_SENTENCE)
    for path in (run_dir / "export", inputs / "finetune-mtp"):
        assert f"mtp-train evaluate {path} --endpoint http://localhost:8000/v1" in outcome.message
    assert json.loads((run_dir / "report.json").read_text())["settings"]["gate"] == "unjudged"
    assert UNJUDGED_SENTENCE in (run_dir / "report.html").read_text()
    assert UNJUDGED_SENTENCE in (run_dir / "export" / "README.md").read_text()
    assert main(["export", str(run_dir), "--out", str(tmp_path / "again")]) == 0
    assert run_quietly(recipe) == outcome


def test_a_trunk_that_no_gpu_can_decode_with_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_inputs(tmp_path / "in")
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    judged = tiny_recipe(inputs, tmp_path / "run", model__dtype="float32")
    gathered = gather_inputs(judged, 1, quiet_progress())
    run = run_module.Run(judged, RunDirectory(tmp_path / "run"), gathered, accelerator, quiet_progress())
    weights = sum(
        one.numel() for one in load_trunk(inputs / "finetune", gathered.finetune.family, dtype="float32").parameters()
    )
    for size, refused in ((4 * weights, True), (20 * weights, False)):
        monkeypatch.setattr(run_module, "device_named", lambda _, size=size: Device("small", "cuda", size))
        with pytest.raises(RecipeError, match=r"Use a larger GPU") if refused else contextlib.nullcontext():
            require_room(run)
        require_room(replace(run, recipe=judged.replaced({"gate.enabled": False})))


def written(run_dir: Path) -> dict[Path, int]:
    """Return when each file was written; but not the record of inputs, which notes files that were hashed again."""
    return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != RECORD_FILE}


def head_bytes(run_dir: Path) -> dict[str, bytes]:
    """Return the artifact's tensors as bytes."""
    head: NativeHead = load_artifact(run_dir / "head").head
    return {pending.key: pending.load().numpy().tobytes() for pending in head.tensors}


ANY_VERDICT = contextlib.suppress(GateRefusedError)


class KilledError(Exception):
    """Stands for the end of the process at some instant."""


def test_a_run_ends_with_its_report_and_the_commands_that_serve_it(
    recipe: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(["run", str(recipe)]) == 0
    lines = capfd.readouterr().out.splitlines()
    page = (run_dir / "report.html").resolve()
    assert f"report: {page.as_uri()}" in lines
    export = run_dir / "export"
    served = [line for line in lines if line.startswith(("vllm: ", "sglang: ", "llama.cpp: "))]
    assert len(served) == 3
    assert sum(str(export) in line for line in served) >= 2


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_gate_refuses_a_head_that_got_worse(
    shuffled: bool, pristine: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start from a good head; with shuffled targets training spoils it, with the right ones it does not."""
    if shuffled:
        from mtp_train.train import packed_rows as module

        shift = module.shift_left
        monkeypatch.setattr(module, "shift_left", lambda tokens, by, fill: (shift(tokens, by, fill) * 7 + 3) % 256)
    overrides = {
        **LEARNS,
        # Hard targets: kl looks at no target token, so shuffling them would spoil nothing.
        "objective__loss": "ce",
        "model": {"trunk": str(run_dir / "export")},
        "head__init": "native",
        "evaluate__arms": ["none", "native", "retrained"],
    }
    recipe, second = tiny_recipe(pristine, tmp_path / "second", **overrides), tmp_path / "second"
    # Training on may help or not; either way it must not spoil the head.
    with pytest.raises(GateRefusedError, match=r"against .* \(native\)") if shuffled else ANY_VERDICT:
        run_quietly(recipe)
    assert (second / "report.html").exists()
    if shuffled:
        outcome = json.loads((second / "outcome.json").read_text())
        assert (outcome["exit_code"], outcome["reason"], outcome["stage"]) == (3, "gate_refused", "done")
        assert not (second / "export").exists()
    else:
        assert json.loads((second / "report.json").read_text())["arms"]["retrained"]["tau"] > 1.8


def test_a_finished_run_says_so_and_is_left_alone(recipe: Path, run_dir: Path) -> None:
    before = written(run_dir)
    recorded = json.loads((run_dir / "outcome.json").read_text())
    assert asdict(run_quietly(load_recipe(recipe))).items() >= recorded.items()
    assert written(run_dir) == before


def test_a_run_killed_in_training_ends_with_the_same_head(
    recipe: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two saved steps; it goes on from the last one."""
    from mtp_train.train import loop

    killed = copy_run(run_dir, tmp_path / "run", "state", "head", "metrics.jsonl", "report.json", "export")
    steps, optimise = iter(range(1, 31)), loop.optimise

    def until_17(*args: Any) -> Any:
        if next(steps) == 17:
            raise KilledError
        return optimise(*args)

    again = load_recipe(recipe, [f"run_dir={killed}"])
    with monkeypatch.context() as patched:
        patched.setattr(loop, "optimise", until_17)
        with pytest.raises(KilledError):
            run_quietly(again)
    run_quietly(again)
    assert head_bytes(killed) == head_bytes(run_dir)
    assert [line["step"] for line in read_metrics(killed)] == [10, 20, 30]
