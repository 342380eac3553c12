"""A fine-tune of the trunk as a recipe: what it leaves, whole or broken off, and what its head is worth."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mtp_train.sft.train
from fine_tunes import LORA, SAVE_STEPS, STEPS, same, split, tuning
from launching import metrics, outcome
from mtp_train.commands.graft import export
from mtp_train.errors import StoppedError, TrainingError
from mtp_train.report.schema import load_report
from mtp_train.sft.watch import COMPLETE_FILE, Watch, newest_checkpoint
from mtp_train.study.arms import parse_arm
from mtp_train.weights.artifact import load_artifact
from preserving import inspect
from runs import run_quietly, write_inputs
from tiny import FAMILY_NAMES


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp(request.param) / "in", request.param)


def weights(path: Path, adapter: Path | None = None) -> dict[str, Any]:
    """Return the weights of a checkpoint as transformers loads them."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(model.state_dict())


@pytest.mark.parametrize("head", ["kept", "beside"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_fine_tune_leaves_a_checkpoint_in_the_bases_layout_with_a_head(
    inputs: Path, head: str, lora: Any, tmp_path: Path
) -> None:
    base, run_dir = inputs / "base", tmp_path / "run"
    done = run_quietly(tuning(inputs, run_dir, way=head, lora=lora))
    assert (done.exit_code, done.stage) == (0, "done")
    assert {path.name for path in run_dir.iterdir()} == {
        "outcome.json",
        "recipe.yaml",
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
    # What was trained is what was written.
    found = weights(made)
    expected = weights(base, last) if lora else weights(last)
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in found.items())
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
    """What no handler of the program's catches."""


def die_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_step_end = Watch.on_step_end

    def killed(self: Watch, args: Any, state: Any, control: Any, **others: Any) -> None:
        on_step_end(self, args, state, control, **others)
        if state.global_step == step:
            raise Killed

    monkeypatch.setattr(Watch, "on_step_end", killed)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_killed_run_goes_on_from_the_newest_whole_checkpoint(
    inputs: Path, lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("qwen") / "in")


def test_sigterm_leaves_a_checkpoint_to_go_on_from(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, on_step_end = tuning(qwen, tmp_path / "run", way="kept"), Watch.on_step_end

    def told(self: Watch, args: Any, state: Any, control: Any, **others: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        on_step_end(self, args, state, control, **others)

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "on_step_end", told)
        with pytest.raises(StoppedError, match=r"told to stop \(SIGTERM\) after step 1 of 4; expected to go on"):
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


def test_a_head_that_learnt_to_draft_is_the_one_that_is_exported(qwen: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {"train__max_steps": 40, "train__tokens_per_step": 384, "train__save_steps": 20}
    arms = {"arms": ["none", "graft", "retrained", "vanilla"], "prompts": 8, "max_new_tokens": 24}
    done = run_quietly(tuning(qwen, run_dir, evaluate=arms, **settings))
    report = load_report(run_dir / "report.json")
    assert report.gate is not None
    assert report.gate.passed, report.gate.reason
    assert done.message.startswith(f"Exported to {run_dir / 'export'}. Tau ")
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
    export(run_dir, tmp_path / "again", link="hard", progress=Progress(disable=True))
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
    monkeypatch.setattr(mtp_train.sft.train, "keep_head", lambda model, base: None)
    run_quietly(tuning(qwen, tmp_path / "run", way="kept"))
    last = newest_checkpoint(tmp_path / "run" / "state")
    assert last is not None
    assert inspect(last).status == "declared_but_missing"
    # The export is the base's files with the trunk changed, and has it whatever transformers saves.
    assert inspect(tmp_path / "run" / "export").status == "healthy"


def test_checkpoints_on_the_way_can_be_served(qwen: Path, tmp_path: Path) -> None:
    run_quietly(tuning(qwen, tmp_path / "run"))
    for step in (SAVE_STEPS, STEPS):
        found = inspect(tmp_path / "run" / "state" / f"checkpoint-{step}", qwen / "base")
        assert (found.status, found.stale) == ("healthy", False)
