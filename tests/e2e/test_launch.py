"""Recipes as users start them: real processes under accelerate's launcher, joined, not joined, refused and killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launching import (
    DEADLINE_SECONDS,
    assert_same_lines,
    environment,
    head,
    launch,
    metrics,
    outcome,
    responses,
)
from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.run_directory import PROVENANCE_FILE
from runs import GETS_NO_BETTER, LEARNS, copy_run, tree, write_inputs, write_recipe

POLL_SECONDS = 0.01


def test_two_processes_train_as_one_does(recipe: Path, run_dir: Path, tmp_path: Path) -> None:
    done = launch("cpu_ddp.yaml", recipe, tmp_path / "run", ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    # Only one process prints.
    assert json.loads(done.stdout) == {"run_dir": str(tmp_path / "run"), **outcome(tmp_path / "run")}
    assert outcome(tmp_path / "run")["exit_code"] == 0
    one, two = metrics(run_dir), metrics(tmp_path / "run")
    facts = [
        {(line["world_size"], line["distributed_type"], line["wrapper"]) for line in lines} for lines in (one, two)
    ]
    assert facts == [{(1, "NO", "HeadTraining")}, {(2, "MULTI_CPU", "DistributedDataParallel")}]
    assert [line["step"] for line in one] == [10, 20, 30]
    assert_same_lines(tmp_path / "run", run_dir, "loss", "loss_depth_1", "loss_depth_2", "lr", "tokens")
    torch.testing.assert_close(head(tmp_path / "run"), head(run_dir), atol=1e-3, rtol=1e-3)
    # Both answered prompts, and together they gave the answers that one gives alone.
    first, second = (responses(tmp_path / "run", rank, world=2) for rank in (0, 1))
    assert first
    assert second
    assert sorted(first + second) == responses(run_dir)


def test_two_processes_measure_a_head_as_one_does(recipe: Path, run_dir: Path, tmp_path: Path) -> None:
    """Each decodes half of the prompts."""
    both = copy_run(run_dir, tmp_path / "run", "report.json", "export")
    done = launch("cpu_ddp.yaml", recipe, both, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    found, expected = (
        json.loads((path / "report.json").read_text().replace(str(path), "RUN")) for path in (both, run_dir)
    )
    assert (found["settings"].pop("processes"), expected["settings"].pop("processes")) == (2, 1)
    assert [without_speed(found[part]) for part in FIGURES] == [without_speed(expected[part]) for part in FIGURES]


FIGURES = ("arms", "cells", "lossless", "samples", "settings")
SPEEDS = ("speed", "second", "round", "break_even", "cost")


def without_speed(found: Any) -> Any:
    """Return the part of a report that no clock decides."""
    if isinstance(found, list):
        return [without_speed(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {key: without_speed(one) for key, one in found.items() if not any(word in key for word in SPEEDS)}


def test_processes_that_do_not_know_one_another_are_refused(recipe: Path, tmp_path: Path) -> None:
    """Without its variable the launcher starts two processes that would train apart and both report success."""
    done = launch("cpu_ddp.yaml", recipe, tmp_path / "run")
    assert done.returncode == 1
    message = (
        "launcher: started 2 processes, of which accelerate joins 1; expected one group. On CPUs set "
        "ACCELERATE_USE_CPU=true and use cpu_ddp.yaml (mtp-train recipes shows its path)."
    )
    assert done.stderr.count(f"mtp-train: {message}\n") == 1
    assert done.stdout == ""
    assert outcome(tmp_path / "run") == {"exit_code": 2, "reason": "bad_input", "message": message, "stage": "check"}
    assert list(tree(tmp_path / "run")) == ["outcome.json"]


def test_two_processes_resolve_auto_alike_and_their_verdict_outlives_the_launcher(
    pristine: Path, tmp_path: Path
) -> None:
    auto = {f"train__{field}": "auto" for field in ("tokens_per_step", "micro_batch_sequences", "warmup_steps")}
    run_dir = tmp_path / "run"
    settings = {**GETS_NO_BETTER, **auto, "data__seq_len_tokens": "auto"}
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, run_dir, **settings)
    done = launch("cpu_ddp.yaml", recipe, run_dir, ACCELERATE_USE_CPU="true")
    assert done.returncode == 1
    verdict = outcome(run_dir)
    assert (verdict["exit_code"], verdict["reason"], verdict["stage"]) == (3, "gate_refused", "done"), done.stderr
    assert "does not lie above 0" in verdict["message"]
    assert not (run_dir / "export").exists()
    assert (run_dir / "report.html").exists()
    train, (line,) = load_recipe(run_dir / RECIPE_FILE).train, metrics(run_dir)
    assert (line["step"], line["world_size"]) == (1, 2)
    assert train.tokens_per_step % (2 * train.micro_batch_sequences) == 0


# Kills

# Small files beside the weights: they make an export take long enough to be killed in the middle.
NUM_NOTES = 3000


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose fine-tune has many notes; every test gives it a run directory of its own."""
    directory = write_inputs(tmp_path_factory.mktemp("launch") / "in", num_records=48)
    (directory / "finetune" / "notes").mkdir()
    for number in range(NUM_NOTES):
        (directory / "finetune" / "notes" / f"{number}.txt").write_text(str(number))
    # A kill can fall between batches of answers.
    batches = {"data__regenerate": {**LEARNS["data__regenerate"], "batch_size": 2}}
    settings = {**LEARNS, **batches, "train__log_steps": 1, "export__link": "copy"}
    return write_recipe(directory / "recipe.yaml", directory, directory / "run", **settings)


@pytest.fixture(scope="module")
def unbroken(noted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one launched process that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    done = launch("single.yaml", noted, run_dir)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    return run_dir


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_notes(run_dir: Path) -> int:
    return sum(len(list(path.glob("notes/*"))) for path in run_dir.glob(".export.*"))


def kill_at(recipe: Path, run_dir: Path, reached: Callable[[], bool]) -> None:
    """Start a run and kill it, all its processes, once ``reached``."""
    command = [sys.executable, "-m", "mtp_train", str(recipe), f"run_dir={run_dir}"]
    with (run_dir.parent / "output.txt").open("w") as output:
        running = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not reached():
            assert running.poll() is None, f"ended too soon: {(run_dir.parent / 'output.txt').read_text()}"
            assert time.monotonic() < deadline, "never got there"
            time.sleep(POLL_SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert running.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_killed_in_every_stage_ends_as_an_unbroken_one(
    noted: Path, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    latest = {"responses": 12, "steps": 22, "looks": 20, "notes": 500}
    moments = {what: random.SystemRandom().randint(1, end) for what, end in latest.items()}
    # Shown where the test fails.
    print(moments)

    kill_at(noted, run_dir, lambda: len(responses(run_dir)) >= moments["responses"])
    assert len(responses(run_dir)) < len(responses(unbroken))
    assert num_steps(run_dir) == 0

    kill_at(noted, run_dir, lambda: num_steps(run_dir) >= moments["steps"])
    assert num_steps(run_dir) < 30
    assert not (run_dir / "head").exists()

    looks = itertools.count()
    kill_at(noted, run_dir, lambda: (run_dir / "head").exists() and next(looks) >= moments["looks"])
    assert not (run_dir / "report.json").exists()

    kill_at(noted, run_dir, lambda: num_notes(run_dir) >= moments["notes"])
    assert num_notes(run_dir) < NUM_NOTES
    assert not (run_dir / "export").exists()
    assert not (run_dir / "outcome.json").exists()

    done = launch("single.yaml", noted, run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_end(run_dir, unbroken)
    capsys.readouterr()
    assert main(["inspect", str(run_dir / "export"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "healthy"


def assert_same_end(run_dir: Path, unbroken: Path) -> None:
    """Responses, loss curve, head and export are an unbroken run's, bit for bit, and no scrap is left."""
    assert responses(run_dir) == responses(unbroken)
    assert [(line["step"], line["loss"]) for line in metrics(run_dir)] == [
        (line["step"], line["loss"]) for line in metrics(unbroken)
    ]
    ours, theirs = head(run_dir), head(unbroken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours, whole = tree(run_dir / "export"), tree(unbroken / "export")
    # The model card names speeds, which no two runs share.
    assert ours.pop("README.md") is not None
    assert whole.pop("README.md") is not None
    assert ours == whole
    names = {path.name for path in run_dir.iterdir()}
    assert names == {path.name for path in unbroken.iterdir()} >= {RECIPE_FILE, PROVENANCE_FILE, "export"}
    assert outcome(run_dir)["exit_code"] == 0
