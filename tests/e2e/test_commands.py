"""What each command prints and writes when its input is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from calls import calls_of
from launching import environment, outcome
from mtp_inference import SpeculativeDecoder
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.trunks import states_of
from mtp_train.trunk.load import Trunk, load_trunk
from repository import RECIPES, REPOSITORY
from runs import Capture, copy_run, document, refusal, run_command, tree, write_recipe

# check


def test_check_prints_the_resolved_recipe_and_the_plan(recipe: Path, tmp_path: Path, capfd: Capture) -> None:
    assert run_command("check", recipe, "train.lr=3e-3", "--show", "recipe") == 0
    (tmp_path / "printed.yaml").write_text(capfd.readouterr().out)
    assert load_recipe(tmp_path / "printed.yaml") == load_recipe(recipe, ["train.lr=3e-3"])
    assert run_command("check", recipe, "train.lr=3e-3") == 0
    printed = capfd.readouterr().out
    assert "\nsteps: 30 of 4 x 96 tokens (0.01 M in all) on 1 process(es), 4 micro-batch(es) each; fp32" in printed
    assert "\n  ollama / lm studio, mlx, exllamav3: not verified by this project\n" in printed
    assert printed.endswith(f"\nlaunch: mtp-train run {recipe} train.lr=3e-3\n")


def test_check_touches_no_weights(own_inputs: Path, tmp_path: Path, new_run: Path, capfd: Capture) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", own_inputs, new_run)
    expected = document(["check", recipe], capfd)
    spoilt = list(own_inputs.rglob("*.safetensors"))
    assert len(spoilt) == 2
    for file in spoilt:
        # Only what the header describes: no number in it is finite.
        start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        file.write_bytes(file.read_bytes()[:start].ljust(file.stat().st_size, b"\xff"))
    before = tree(tmp_path)
    assert document(["check", recipe], capfd) == expected
    assert tree(tmp_path) == before
    # The same files stop a command that reads weights.
    assert run_command("generate", own_inputs / "base", "--prompt", "x") == 2


# regenerate


def test_regenerated_responses_are_the_runs_and_a_lost_one_is_generated_again(
    inputs: Path, tmp_path: Path, new_run: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"max_new_tokens": 6, "batch_size": 2}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, new_run, data__regenerate=data)
    counts = document(["regenerate", recipe], capfd)
    (file,) = (new_run / "data").glob("*/*.jsonl")
    written = file.read_bytes()
    assert counts["responses"] == len(written.splitlines())
    assert not (new_run / "head").exists()
    batches = calls_of(monkeypatch, SpeculativeDecoder, "generate")
    assert document(["regenerate", recipe], capfd) == counts
    assert batches == []
    # A response that got lost is the only one that is generated again.
    lines = written.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    assert document(["regenerate", recipe], capfd) == counts
    assert len(batches) == 1
    monkeypatch.setattr("mtp_train.runs.pipeline.train_stage", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert run_command("run", recipe) == 143
    assert sorted(file.read_bytes().splitlines()) == sorted(written.splitlines())
    assert outcome(new_run)["stage"] == "train"


@pytest.mark.parametrize(("slow", "answered_in"), [(False, "bfloat16"), (True, "float32")])
def test_a_cpu_that_multiplies_bf16_answers_in_it_and_trains_on_what_is_held(
    slow: bool, answered_in: str, inputs: Path, tmp_path: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[str] = []
    generated = calls_of(monkeypatch, SpeculativeDecoder, "generate")

    def stopped(run: Any, *_rest: Any, **_settings: Any) -> None:
        dtypes.append(states_of(run, []).ends.dtype_name)
        os.kill(os.getpid(), signal.SIGTERM)

    loads: list[torch.dtype] = []

    def counted(*args: Any, dtype: torch.dtype, **settings: Any) -> Trunk:
        loads.append(dtype)
        return load_trunk(*args, dtype=dtype, **settings)

    monkeypatch.setattr("mtp_train.runs.trunks.load_trunk", counted)
    monkeypatch.setattr("mtp_train.runs.trunks.slow_halves", lambda *_: slow)
    monkeypatch.setattr("mtp_train.runs.pipeline.train_stage", stopped)
    # The demo is stored in bf16. Without a gate nothing else is decoded before training.
    fields = ["model.trunk=demo:finetune", "model.head_from=demo:base", "data.regenerate={max_new_tokens: 4}"]
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, new_run, gate={"enabled": False})
    assert run_command("run", recipe, *fields) == 143
    assert {decoder.trunk.dtype_name for decoder, *_ in generated} == {answered_in}
    assert dtypes == ["float32"]
    loads.clear()
    # Alone, answers need one trunk.
    assert run_command("regenerate", recipe, *fields, f"run_dir={tmp_path / 'answers'}") == 0
    assert loads == [getattr(torch, answered_in)]


# export


def test_export_of_a_run_is_what_the_run_exported(run_dir: Path, out: Path) -> None:
    assert run_command("export", run_dir, "--out", out) == 0
    assert tree(out) == tree(run_dir / "export")
    trunk, head = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert (out / trunk).samefile(run_dir / "export" / trunk)
    assert load_file(out / head).keys() == load_file(run_dir / "head" / "head.safetensors").keys()


def test_a_run_gives_the_gguf_file_of_its_export(run_dir: Path, tmp_path: Path) -> None:
    found = {}
    for name, source in (("run", run_dir), ("export", run_dir / "export")):
        assert run_command("export", source, "--out", tmp_path / name, "--gguf", "q8_0") == 0
        (file,) = (tmp_path / name).iterdir()
        found[file.name] = {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(file).tensors}
    # The file has the trunk's name, which the run records.
    assert found["mtp-finetune.gguf"] == found["mtp-export.gguf"]
    assert "blk.4.nextn.eh_proj.weight" in found["mtp-finetune.gguf"]


@pytest.mark.parametrize("option", [[], ["--gguf", "f16"]], ids=["checkpoint", "gguf"])
def test_export_respects_the_gate(refused: Path, tmp_path: Path, out: Path, capfd: Capture, option: list[str]) -> None:
    assert run_command("export", refused.parent / "run", "--out", out, *option) == 3
    assert "lie above 0. The head as it was is not shown to be worse: mtp-train graft" in capfd.readouterr().err
    assert tree(tmp_path) == {}


def test_export_of_a_run_that_was_never_measured_is_refused(
    run_dir: Path, new_run: Path, out: Path, capfd: Capture
) -> None:
    unmeasured = copy_run(run_dir, new_run, "report.json")
    message = refusal(["export", unmeasured, "--out", out], capfd)
    assert "its head has not been measured; expected a run that reached the gate" in message
    assert not out.exists()


# --json, --help, and recipes as programs


def test_a_refused_run_prints_its_verdict_as_a_document(refused: Path, capfd: Capture) -> None:
    found = document(["run", refused], capfd, exit_code=3)
    run_dir = refused.parent / "run"
    assert (found["run_dir"], found["exit_code"], found["reason"]) == (str(run_dir), 3, "gate_refused")
    assert "does not lie above 0" in found["message"]
    assert not (run_dir / "export").exists()


def program(command: list[Any], cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Run a program as a user of this environment would."""
    env = environment(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_a_recipe_is_a_program(inputs: Path, tmp_path: Path, new_run: Path) -> None:
    shipped = RECIPES / "retrain_head.yaml"
    assert os.access(shipped, os.X_OK)
    helped = program([f"./{shipped.relative_to(REPOSITORY)}", "--help"])
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("usage: mtp-train run ")
    # Another one with the same first line: the program's exit code is the command's.
    own = write_recipe(tmp_path / "own.yaml", inputs, new_run, train__steps=3)
    own.write_text(shipped.read_text().splitlines()[0] + "\n" + own.read_text())
    own.chmod(0o755)
    refused = program([str(own)], cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("mtp-train: train.steps: unknown; expected a field of train. Did you mean")
