"""Hidden states on disk, choosing by acceptance, and LoRA on the head, through a whole run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import holds, same
from json_files import read_json
from launching import head
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.errors import GateRefusedError
from mtp_train.evaluation.results import load_report
from mtp_train.heads.lora import is_lora
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from mtp_train.train.log import read_metrics
from mtp_train.train.select import score_of
from runs import LEARNS, write_recipe

RUN: dict[str, Any] = {**LEARNS, "train__max_steps": 12, "train__save_steps": 6, "train__log_steps": 3}


def run(inputs: Path, directory: Path, **overrides: Any) -> Path:
    directory.mkdir(exist_ok=True)
    recipe = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **(RUN | overrides))
    pipeline.run(load_recipe(recipe))
    return directory / "run"


UNJUDGED = {"gate__enabled": False, "export__enabled": False}


def test_a_training_without_a_gain_returns_the_head_that_it_was_given(
    own_inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning rate that destroys a trained head. The graft that it proposes is written beside the inputs."""
    good = run(own_inputs, tmp_path / "good", train__select={"every_steps": 4, "share": 0.3}, gate__enabled=False)
    lines = [line for line in read_metrics(good) if "held_out_tau" in line]
    assert [line["step"] for line in lines] == [0, 4, 8, 12]
    best = max(lines, key=score_of)
    state = read_json(max((good / "state").glob("step-*/state.json")))
    assert state["best"]["score"] == score_of(best)
    assert state["best"]["start"] == score_of(lines[0]) < score_of(best)

    spoils = {"model__head_from": str(good), "train__lr": 1.0, "train__select": {"patience": 2, "share": 0.3}}
    with pytest.raises(GateRefusedError, match="training gave no gain: in 2 measurements") as refused:
        run(own_inputs, tmp_path / "worse", **spoils)
    worse = tmp_path / "worse" / "run"
    # Stopped at the second of twelve steps: measures are two steps apart.
    assert read_metrics(worse)[-1]["step"] == 4
    before = head(good)
    after = head(worse)
    assert holds(after, before)
    report = load_report(worse / "report.json")
    assert report.arms["retrained"].tau == report.arms["graft"].tau
    monkeypatch.chdir(tmp_path)
    command = shlex.split(str(refused.value).rpartition("not shown to be worse: ")[2])
    assert main(command[1:]) == 0
    grafted = open_checkpoint(Path(command[-1]))
    assert same({name: grafted.read(name) for name in before}, before)


def test_the_automatic_rate_is_recorded_and_kept(
    inputs: Path, tmp_path: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_train.runs.resolve.GOOD_OVERLAP", 0.0)
    fields = {"train__lr": "auto", "train__max_steps": 2, "train__select": {"share": 0.3}, **UNJUDGED}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, new_run, **(RUN | fields))
    assert main(["run", str(recipe)]) == 0
    recorded = load_recipe(new_run / "recipe.yaml")
    config = read_json(inputs / "finetune" / "config.json")
    width = config.get("text_config", config)["hidden_size"]
    assert recorded.train.lr == pytest.approx(0.2 * 0.4096 / width)
    assert max(line["lr"] for line in read_metrics(new_run) if "lr" in line) <= recorded.train.lr
    # The same command finds its run, whose rate is that of the record.
    assert main(["run", str(recipe)]) == 0


@pytest.mark.slow
def test_a_head_that_learns_by_lora_is_exported_like_any_other(inputs: Path, tmp_path: Path) -> None:
    run_dir = run(inputs, tmp_path, **{**LEARNS, "head__lora": {"r": 8, "alpha": 16}})
    base = open_checkpoint(inputs / "base")
    exported = open_checkpoint(run_dir / "export")
    assert exported.tensors.keys() == base.tensors.keys()
    trained = head(run_dir)
    # LoRA adapts matrices and leaves norms.
    assert all(torch.equal(value, base.read(key)) == (value.ndim == 1) for key, value in trained.items())
    state = max((run_dir / "state").glob("step-*"))
    assert all(map(is_lora, load_file(state / "head.safetensors")))
