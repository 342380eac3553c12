"""A fine-tune of the trunk as a recipe: what it leaves, whole or broken off, and what its head is worth."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mtp_train.job.sft.fine_tune
import mtp_train.job.sft.tuning
from checkpoints import same, split
from fine_tunes import LORA, SAVE_STEPS, STEPS, tuning
from launching import COMMAND_LINE, head, metrics, outcome, start
from mtp_train import export, inspect
from mtp_train.acceptance.gate import GateVerdict
from mtp_train.errors import StoppedError, TrainingError
from mtp_train.evaluation.arms import parse_arm
from mtp_train.evaluation.results import load_report
from mtp_train.job.sft.tuning import COMPLETE_FILE, Watch, newest_checkpoint
from mtp_train.recipe.loading import dump_recipe
from mtp_train.weights.artifact import load_artifact
from runs import run_quietly, write_inputs

with_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed: not installed")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("qwen") / "in")


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture, whose experts transformers stacks, and its head after the trunk's layers."""
    return write_inputs(tmp_path_factory.mktemp("glm") / "in", "glm4_moe")


def weights(path: Path, adapter: Path | None = None) -> dict[str, Any]:
    """Return the weights of a checkpoint as transformers loads them."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("family", "head", "lora"),
    [("qwen", "beside", None), ("qwen", "kept", LORA), ("glm", "kept", None), ("glm", "beside", LORA)],
    ids=["beside-full", "kept-lora", "kept-mixture-full", "beside-mixture-lora"],
)
def test_a_fine_tune_leaves_a_checkpoint_in_the_bases_layout_with_a_head(
    family: str, head: str, lora: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    inputs = request.getfixturevalue(family)
    base, run_dir = inputs / "base", tmp_path / "run"
    done = run_quietly(tuning(inputs, run_dir, way=head, lora=lora))
    assert (done.exit_code, done.stage) == (0, "done")
    assert {path.name for path in run_dir.iterdir()} == {
        "outcome.json",
        "recipe.yaml",
        "inputs.json",
        "provenance.json",
        "metrics.jsonl",
        "state",
        "report.json",
        "report.html",
        "acceptance.csv",
        "figures",
        "export",
        *(["head"] if head == "beside" else []),
        *(["adapter"] if lora else []),
    }
    made = run_dir / "export"
    assert inspect(made, base).status == "healthy"
    (trunk, own), (old_trunk, old) = split(made), split(base)
    assert [(key, value.dtype, value.shape) for key, value in trunk.items()] == [
        (key, value.dtype, value.shape) for key, value in old_trunk.items()
    ]
    assert json.loads((made / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert not same(trunk, old_trunk)
    arms = load_report(run_dir / "report.json").arms
    assert list(arms) == ["none", "graft", *(["retrained"] if head == "beside" else [])]
    # Little was learnt and few prompts decoded: the gate keeps the head from before.
    assert same(own, old)
    last = newest_checkpoint(run_dir / "state")
    assert last is not None
    assert last.name == f"checkpoint-{STEPS}"
    for step in (SAVE_STEPS, STEPS) if lora is None else ():
        found = inspect(last.with_name(f"checkpoint-{step}"), base)
        assert (found.status, found.stale) == ("healthy", head == "kept")
    # What was trained is what was written.
    written, expected = weights(made), weights(base, last) if lora else weights(last)
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in written.items())
    if head == "beside":
        learnt = {pending.key: pending.load() for pending in load_artifact(run_dir / "head").head.tensors}
        assert not same(learnt, old)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert ("mtp_loss_2" in lines[0]) == (head == "beside")
    assert {line["wrapper"] for line in lines} == {"PeftModelForCausalLM" if lora else type_name(base)}


def type_name(path: Path) -> str:
    return type(AutoModelForCausalLM.from_pretrained(path)).__name__


class Killed(BaseException):
    """An exception that the program does not catch."""


def die_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_step_end = Watch.on_step_end

    def killed(self: Watch, args: Any, state: Any, control: Any, **others: Any) -> None:
        on_step_end(self, args, state, control, **others)
        if state.global_step == step:
            raise Killed

    monkeypatch.setattr(Watch, "on_step_end", killed)


@pytest.mark.parametrize(("family", "lora"), [("glm", None), ("qwen", LORA)], ids=["mixture-full", "lora"])
def test_a_killed_run_goes_on_from_the_newest_whole_checkpoint(
    family: str, lora: Any, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = request.getfixturevalue(family)
    unbroken, run_dir = tmp_path / "unbroken", tmp_path / "run"
    run_quietly(tuning(inputs, unbroken, lora=lora))
    with monkeypatch.context() as patched:
        die_after(SAVE_STEPS + 1, patched)
        with pytest.raises(Killed):
            run_quietly(tuning(inputs, run_dir, lora=lora))
    # Killed while it saved: newer, and torn.
    torn = run_dir / "state" / f"checkpoint-{SAVE_STEPS + 1}"
    torn.mkdir()
    (torn / "trainer_state.json").write_text("{")
    assert run_quietly(tuning(inputs, run_dir, lora=lora)).exit_code == 0
    assert not torn.exists()
    for name in ("export", "head"):
        pattern = "*.safetensors"
        files = sorted(path.name for path in (unbroken / name).glob(pattern))
        assert files
        for file in files:
            assert same(load_file(run_dir / name / file), load_file(unbroken / name / file)), (name, file)
    losses = [[line[field] for line in metrics(run_dir)] for field in ("step", "loss", "mtp_loss")]
    assert losses == [[line[field] for line in metrics(unbroken)] for field in ("step", "loss", "mtp_loss")]


def test_sigterm_leaves_a_checkpoint_to_go_on_from(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, on_step_end = tuning(qwen, tmp_path / "run", way="kept"), Watch.on_step_end

    def told(self: Watch, args: Any, state: Any, control: Any, **others: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        on_step_end(self, args, state, control, **others)

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "on_step_end", told)
        with pytest.raises(StoppedError, match=r"stopped by SIGTERM after step 1 of 4\.\nThe state is saved"):
            run_quietly(recipe)
    assert (tmp_path / "run" / "state" / "checkpoint-1" / COMPLETE_FILE).is_file()
    assert outcome(tmp_path / "run")["reason"] == "stopped"
    assert run_quietly(recipe).exit_code == 0
    assert run_quietly(recipe).stage == "done"


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(qwen: Path, tmp_path: Path) -> None:
    recipe = tuning(qwen, tmp_path / "run", way="kept", train__lr=1e30, train__save_steps=1)
    with pytest.raises(TrainingError, match=r"step \d: loss nan, .*; expected finite numbers. Lower train.lr"):
        run_quietly(recipe)
    newest = newest_checkpoint(tmp_path / "run" / "state")
    assert newest is None or all(torch.isfinite(value).all() for value in weights(newest).values())


def test_a_head_that_the_gate_lets_pass_is_the_one_that_is_exported(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    passed = GateVerdict(True, "graft", (0.1, 0.3), "tau 1.40 against 1.20 (graft) on 2 prompts")
    monkeypatch.setattr(mtp_train.job.sft.fine_tune, "decide_gate", lambda *counts: passed)
    arms = {"arms": ["none", "graft", "retrained", "vanilla"], "prompts": 2, "max_new_tokens": 6}
    done = run_quietly(tuning(qwen, run_dir, evaluate=arms))
    assert list(load_report(run_dir / "report.json").arms) == arms["arms"]
    assert done.message.startswith(f"Exported to {run_dir / 'export'}. Tau 1.40 ")
    assert done.message.endswith("The export has the head trained beside the trunk")
    learnt = {pending.key: pending.load() for pending in load_artifact(run_dir / "head").head.tensors}
    assert same(split(run_dir / "export")[1], learnt)
    found = inspect(run_dir / "export", qwen / "base")
    assert (found.status, found.stale) == ("healthy", False)
    card = (run_dir / "export" / "README.md").read_text(encoding="utf-8")
    assert "trained further beside the weights" in card
    assert "bit for bit" not in card
    # The run stands for what it exported: its recipe's trunk is the one before.
    assert parse_arm(str(run_dir)).trunk == str(run_dir / "export")
    export(run_dir, tmp_path / "again")
    assert all(
        same(ours, theirs) for ours, theirs in zip(split(tmp_path / "again"), split(run_dir / "export"), strict=True)
    )


def test_a_model_that_lost_its_head_gets_one_from_another_checkpoint(qwen: Path, tmp_path: Path) -> None:
    model = {"trunk": str(qwen / "finetune"), "head_from": str(qwen / "base")}
    head = {"init": "graft", "num_depths": 2}
    assert run_quietly(tuning(qwen, tmp_path / "run", way="kept", model=model, head=head)).exit_code == 0
    assert inspect(tmp_path / "run" / "export").status == "healthy"
    assert same(split(tmp_path / "run" / "export")[1], split(qwen / "base")[1])


def test_without_the_line_that_keeps_the_head_checkpoints_have_none(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: it is not transformers that keeps it."""
    monkeypatch.setattr(mtp_train.job.sft.tuning, "keep_head", lambda model, base: None)
    run_quietly(tuning(qwen, tmp_path / "run", way="kept"))
    last = newest_checkpoint(tmp_path / "run" / "state")
    assert last is not None
    assert inspect(last).status == "declared_but_missing"
    # The export is the base's files with the trunk changed, and has it whatever transformers saves.
    assert inspect(tmp_path / "run" / "export").status == "healthy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "lora", "variables", "wrapper"),
    [
        pytest.param("cpu_ddp.yaml", LORA, {"ACCELERATE_USE_CPU": "true"}, "DistributedDataParallel", id="ddp-lora"),
        pytest.param("zero2.yaml", None, {}, "DeepSpeedEngine", id="zero2-full", marks=with_deepspeed),
    ],
)
def test_two_processes_learn_what_one_learns(
    machine: str, lora: Any, variables: dict[str, str], wrapper: str, qwen: Path, tmp_path: Path
) -> None:
    one, two, path = tmp_path / "one", tmp_path / "two", tmp_path / "recipe.yaml"
    run_quietly(tuning(qwen, one, lora=lora))
    path.write_text(dump_recipe(tuning(qwen, two, lora=lora)), encoding="utf-8")
    done = start(machine, *COMMAND_LINE, path, flags=("--num_processes", "2"), **variables)
    assert outcome(two)["stage"] == "done", done.stderr
    assert {(line["world_size"], line["wrapper"]) for line in metrics(two)} == {(2, wrapper)}
    for field in ("loss", "mtp_loss", "tokens"):
        assert [line[field] for line in metrics(two)] == pytest.approx([line[field] for line in metrics(one)], rel=1e-3)
    for ours, theirs in zip(split(two / "export"), split(one / "export"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(head(two), head(one), atol=1e-3, rtol=1e-3)
    last = newest_checkpoint(two / "state")
    assert last is not None
    assert lora is not None or inspect(last).status == "healthy"
