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

import pytest
import torch

from launching import (
    CPU_SHARDS,
    DEADLINE_SECONDS,
    assert_same_lines,
    assert_same_run,
    ended,
    environment,
    head,
    launch,
    metrics,
    outcome,
    responses,
    start,
    without_speed,
)
from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.recipe.loading import load_recipe
from runs import GETS_NO_BETTER, LEARNS, TINY_RESCUE, copy_run, tree, write_inputs, write_recipe

POLL_SECONDS = 0.01


@pytest.fixture(scope="module")
def both(recipe: Path, run_dir: Path, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left that did three runs in turn: ``whole``, ``measured`` and ``auto``; and ``printed``."""
    directory = tmp_path_factory.mktemp("both")
    auto = {f"train__{field}": "auto" for field in ("tokens_per_step", "micro_batch_sequences", "warmup_steps")}
    settings = {**GETS_NO_BETTER, **auto, "data__seq_len_tokens": "auto"}
    short = write_recipe(directory / "recipe.yaml", pristine, directory / "auto", **settings)
    measured = copy_run(run_dir, directory / "measured", "report.json", "export")
    runs = [[recipe, f"run_dir={directory / 'whole'}"], [recipe, f"run_dir={measured}"], [short]]
    words = [word for run in runs for word in (*run, "--json", "then")]
    done = start("cpu_ddp.yaml", CPU_SHARDS, *words, ACCELERATE_USE_CPU="true")
    # The launcher's own, as the gate refuses the last head.
    assert done.returncode == 1, done.stderr
    (directory / "printed").write_text(done.stdout)
    return directory


def test_only_one_process_prints(both: Path) -> None:
    printed = (both / "printed").read_text().replace("}\n{", "},{")
    names = ("whole", "measured", "auto")
    assert json.loads(f"[{printed}]") == [{"run_dir": str(both / name), **outcome(both / name)} for name in names]
    assert [outcome(both / name)["exit_code"] for name in names] == [0, 0, 3]


def test_two_processes_train_as_one_does(both: Path, run_dir: Path) -> None:
    one = metrics(run_dir)
    two = metrics(both / "whole")
    facts = [
        {(line["world_size"], line["distributed_type"], line["wrapper"]) for line in lines} for lines in (one, two)
    ]
    assert facts == [{(1, "NO", "HeadTraining")}, {(2, "MULTI_CPU", "DistributedDataParallel")}]
    assert [line["step"] for line in one] == [10, 20, 30]
    assert_same_lines(both / "whole", run_dir, "loss", "loss_depth_1", "loss_depth_2", "lr", "tokens")
    torch.testing.assert_close(head(both / "whole"), head(run_dir), atol=1e-3, rtol=1e-3)
    # Both answered prompts, and together they gave the answers that one gives alone.
    first, second = (responses(both / "whole", rank, world=2) for rank in (0, 1))
    assert first
    assert second
    assert sorted(first + second) == responses(run_dir)


FIGURES = ("arms", "cells", "lossless", "samples", "settings")


def test_two_processes_measure_a_head_as_one_does(both: Path, run_dir: Path) -> None:
    """Each decodes half of the prompts."""
    found, expected = (
        json.loads((path / "report.json").read_text().replace(str(path), "RUN"))
        for path in (both / "measured", run_dir)
    )
    assert [one["settings"].pop("processes") for one in (found, expected)] == [2, 1]
    # Products of fewer rows may be summed in another order.
    noise, alone = (one["lossless"].pop("noise") for one in (found, expected))
    assert noise == pytest.approx(alone, rel=0.1)
    assert [without_speed(found[part]) for part in FIGURES] == [without_speed(expected[part]) for part in FIGURES]


def test_two_processes_resolve_auto_alike_and_their_verdict_outlives_the_launcher(both: Path) -> None:
    run_dir = both / "auto"
    verdict = outcome(run_dir)
    assert ended(run_dir) == (3, "gate_refused", "done")
    assert "does not lie above 0" in verdict["message"]
    assert not (run_dir / "export").exists()
    assert (run_dir / "report.html").exists()
    train, (line,) = load_recipe(run_dir / RECIPE_FILE).train, metrics(run_dir)
    assert (line["step"], line["world_size"]) == (1, 2)
    assert train.tokens_per_step % (2 * train.micro_batch_sequences) == 0


@pytest.mark.slow
def test_two_processes_probe_and_rescue_as_one_does(pristine: Path, tmp_path: Path) -> None:
    """Each decodes half of the prompts of the comparison, of the wirings and of the runs, and trains on its share."""
    settings = [one for one in TINY_RESCUE if not one.startswith(("train.max_steps", "train.warmup"))]
    pair = [pristine / "finetune", "--from", pristine / "base", "--data", pristine / "chats.jsonl", "--json"]
    found = []
    for machine, variables in (("cpu_ddp.yaml", {"ACCELERATE_USE_CPU": "true"}), ("single.yaml", {})):
        out = tmp_path / machine
        probing, rescuing = ([name, *pair, "--out", out / name, "--set", *settings] for name in ("probe", "rescue"))
        done = start(machine, CPU_SHARDS, *probing, "then", *rescuing, **variables)
        assert done.returncode == 0, done.stderr
        text = done.stdout.replace(str(out), "OUT").replace("}\n{", "},{")
        printed = json.loads(f"[{text}]")
        worlds = {line["world_size"] for line in metrics(out / "rescue") if "world_size" in line}
        found.append((printed, head(out / "rescue"), worlds, done.stderr))
        wrote = {path.name for path in (out / "probe/comparison/measured").rglob("*.jsonl")}
        assert wrote == ({"0.jsonl", "1.jsonl"} if variables else {"0.jsonl"})
    (both, its_head, two, said), (alone, own_head, one, _) = found
    assert (two, one) == ({2}, {1})
    assert both == alone
    assert both[0]["trained_steps"] == 1
    torch.testing.assert_close(its_head, own_head, atol=1e-3, rtol=1e-3)
    assert said.count("stage 1 of 7, comparing") == 1
    assert said.count("stage 7 of 7, measuring") == 1


def test_processes_that_do_not_know_one_another_are_refused(recipe: Path, new_run: Path) -> None:
    """Without its variable the launcher starts two processes that would train apart and both report success."""
    done = launch("cpu_ddp.yaml", recipe, new_run)
    assert done.returncode == 1
    message = (
        "launcher: started 2 processes, of which accelerate joins 1; expected one group. On CPUs set "
        "ACCELERATE_USE_CPU=true and use cpu_ddp.yaml (mtp-train recipes shows its path)."
    )
    assert done.stderr.count(f"mtp-train: {message}\n") == 1
    assert done.stdout == ""
    assert outcome(new_run) == {"exit_code": 2, "reason": "bad_input", "message": message, "stage": "check"}
    assert list(tree(new_run)) == ["outcome.json"]


# Small files beside the weights: they make an export take long enough to be killed in the middle.
NUM_NOTES = 3000


def num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_notes(run_dir: Path) -> int:
    return sum(len(list(path.glob("notes/*"))) for path in run_dir.glob(".export.*"))


def kill_at(recipe: Path, run_dir: Path, reached: Callable[[], bool]) -> None:
    """Start a run and kill it, all its processes, once ``reached``."""
    command = [sys.executable, "-m", "mtp_train", str(recipe), f"run_dir={run_dir}"]
    running = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while not reached():
            assert running.poll() is None, "ended too soon"
            assert time.monotonic() < deadline, "never got there"
            time.sleep(POLL_SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert running.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_killed_at_some_moment_of_every_stage_ends_as_an_unbroken_one(tmp_path: Path, new_run: Path) -> None:
    inputs = write_inputs(tmp_path / "in", num_records=48)
    (inputs / "finetune" / "notes").mkdir()
    for number in range(NUM_NOTES):
        (inputs / "finetune" / "notes" / f"{number}.txt").write_text(str(number))
    # A kill can fall between batches of answers.
    batches = {"data__regenerate": {**LEARNS["data__regenerate"], "batch_size": 2}}
    settings = {**LEARNS, **batches, "train__log_steps": 1, "export__link": "copy"}
    run_dir = new_run
    unbroken = tmp_path / "unbroken"
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, run_dir, **settings)
    done = launch("single.yaml", recipe, unbroken)
    assert done.returncode == 0, done.stderr

    latest = {"responses": 12, "steps": 22, "looks": 20, "notes": 500}
    moments = {what: random.SystemRandom().randint(1, end) for what, end in latest.items()}
    # Shown where the test fails.
    print(moments)
    kill_at(recipe, run_dir, lambda: len(responses(run_dir)) >= moments["responses"])
    assert len(responses(run_dir)) < len(responses(unbroken))
    assert num_steps(run_dir) == 0
    kill_at(recipe, run_dir, lambda: num_steps(run_dir) >= moments["steps"])
    assert num_steps(run_dir) < 30
    assert not (run_dir / "head").exists()
    looks = itertools.count()
    kill_at(recipe, run_dir, lambda: (run_dir / "head").exists() and next(looks) >= moments["looks"])
    assert not (run_dir / "report.json").exists()
    kill_at(recipe, run_dir, lambda: num_notes(run_dir) >= moments["notes"])
    assert num_notes(run_dir) < NUM_NOTES
    assert not (run_dir / "export").exists()
    assert not (run_dir / "outcome.json").exists()

    done = launch("single.yaml", recipe, run_dir)
    assert done.returncode == 0, done.stderr
    assert_same_run(run_dir, unbroken)
