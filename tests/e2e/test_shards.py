"""One recipe on every machine setting: whole or in shards, unbroken or killed, it ends with the same head."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import holds, same
from json_files import read_json
from launching import (
    CPU,
    CPU_SHARDS,
    DDP,
    DEADLINE_SECONDS,
    FSDP2,
    ZERO2,
    ZERO3,
    Setup,
    assert_same_lines,
    cases,
    ended,
    environment,
    free_port,
    head,
    metrics,
    outcome,
    start,
)
from mtp_train.errors import GateRefusedError
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from runs import ATTACH, LEARNS, tiny_recipe, write_headless, write_inputs, write_recipe

pytestmark = pytest.mark.slow
TWO = ("--num_processes", "2")
STEPS, SAVE_STEPS, DIES_BEFORE = 8, 3, 5
FEW_TOKENS = str(240 * 32 * 4)
SHORT = {
    "data__regenerate": {"max_new_tokens": 16},
    "train__max_steps": STEPS,
    "train__save_steps": SAVE_STEPS,
    "train__lr": 1e-2,
    "train__tokens_per_step": 384,
    "evaluate__prompts": 2,
    "gate__confidence": 0.6,
    "evaluate__max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("shards") / "in", num_records=48)


@pytest.fixture(scope="module")
def one_process(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one process that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    recipe = tiny_recipe(inputs, run_dir, **SHORT)
    # Whether the head got better is not the matter here.
    with contextlib.suppress(GateRefusedError):
        pipeline.run(recipe)
    return run_dir


def run_on(
    setup: Setup, inputs: Path, run_dir: Path, changes: Mapping[str, Any] = SHORT, **variables: str
) -> subprocess.CompletedProcess[str]:
    recipe = write_recipe(run_dir.parent / "recipe.yaml", inputs, run_dir, **changes)
    return start(setup.machine, CPU_SHARDS, recipe, "--json", flags=TWO, **setup.variables, **variables)


@cases(DDP, FSDP2, ZERO2, ZERO3)
def test_the_same_recipe_gives_the_same_run_killed_or_not(
    setup: Setup, inputs: Path, one_process: Path, tmp_path: Path
) -> None:
    unbroken = tmp_path / "unbroken" / "run"
    killed = tmp_path / "killed" / "run"
    for run_dir in (unbroken, killed):
        run_dir.parent.mkdir()
    done = run_on(setup, inputs, unbroken)
    assert outcome(unbroken)["stage"] == "done", done.stderr
    lines = metrics(unbroken)
    facts = {(line["world_size"], line["distributed_type"], line["wrapper"]) for line in lines}
    assert facts == {(2, setup.distributed_type, setup.wrapper)}
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert_same_lines(unbroken, one_process, "loss", "loss_depth_1", "loss_depth_2", "grad_norm", "lr", "tokens")
    torch.testing.assert_close(head(unbroken), head(one_process), atol=1e-4, rtol=1e-4)
    # Whole, and of no number of processes: another set-up could go on from it.
    torch.testing.assert_close(state(unbroken, STEPS), state(one_process, STEPS), atol=1e-4, rtol=1e-4)

    lost = run_on(setup, inputs, killed, DIES=f"1:{DIES_BEFORE}")
    assert lost.returncode == 1
    assert "Signal 9 (SIGKILL) received" in lost.stderr
    assert [path.name for path in (killed / "state").iterdir()] == [f"step-{SAVE_STEPS:08d}"]
    assert not (killed / "head").exists()
    done = run_on(setup, inputs, killed)
    assert outcome(killed)["stage"] == "done", done.stderr
    assert [line["loss"] for line in metrics(killed)] == [line["loss"] for line in lines]
    assert same(head(killed), head(unbroken))


# Heads whose training differs: adapters on the head, of which the best step is kept, and states between the layers of a
# trunk that never had a head.
OTHER_HEADS = {
    "lora": {**SHORT, "head__lora": {"r": 8, "alpha": 16}, "train__select": {"every_steps": 2}},
    "eagle3": {**ATTACH, **SHORT, "head__kind": "eagle3", "head__init": "random", "export__enabled": False},
}


@cases(DDP, FSDP2, ZERO3)
@pytest.mark.parametrize("kind", OTHER_HEADS)
def test_other_heads_learn_in_two_processes_what_they_learn_in_one(
    kind: str, setup: Setup, inputs: Path, tmp_path: Path
) -> None:
    if kind == "eagle3":
        inputs = write_headless(tmp_path / "in", "qwen3", num_layers=8).parent
    one = tmp_path / "one" / "run"
    two = tmp_path / "two" / "run"
    two.parent.mkdir()
    with contextlib.suppress(GateRefusedError):
        pipeline.run(tiny_recipe(inputs, one, **OTHER_HEADS[kind]))
    done = run_on(setup, inputs, two, OTHER_HEADS[kind])
    assert outcome(two)["stage"] == "done", done.stderr
    assert {(line["world_size"], line["wrapper"]) for line in metrics(two) if "loss" in line} == {(2, setup.wrapper)}
    measured = ["held_out_overlap_depth_1"] if kind == "lora" else []
    assert_same_lines(two, one, "loss", "grad_norm", *measured)
    for found, kept in ((head(two), head(one)), (state(two, STEPS), state(one, STEPS))):
        torch.testing.assert_close(found, kept, atol=2e-3, rtol=0)


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    pipeline.run(tiny_recipe(inputs, run_dir, **LEARNS, gate__enabled=False))
    return run_dir


@cases(FSDP2, ZERO2, ZERO3)
def test_training_without_a_gain_returns_the_head_that_it_was_given(
    setup: Setup, inputs: Path, trained: Path, new_run: Path
) -> None:
    spoils = {"train__lr": 1.0, "train__select": {"patience": 2, "share": 0.3}, "gate__enabled": False}
    done = run_on(setup, inputs, new_run, {**LEARNS, **spoils, "model__head_from": str(trained)})
    assert outcome(new_run)["stage"] == "done", done.stderr
    before = head(trained)
    after = head(new_run)
    assert holds(after, before)
    # Control: it was trained.
    assert metrics(new_run)[-1]["step"] >= 2


@cases(FSDP2, ZERO3)
def test_states_kept_by_processes_that_share_the_trunk_give_the_same_run(
    setup: Setup, inputs: Path, one_process: Path, new_run: Path
) -> None:
    """One process runs out of disk meanwhile: the other must not wait for it, and what they kept stays."""
    run_dir = new_run
    kept = {**SHORT, "train__hidden_cache": {}}
    lost = run_on(setup, inputs, run_dir, kept, SHARD_BYTES=FEW_TOKENS, FULL="1:1")
    assert lost.returncode == 1
    assert lost.stderr.count(f"mtp-train: {run_dir}: writing the run failed (No space left on device)") == 1, (
        lost.stderr
    )
    # The first process, which only finds that the other is gone, does not write over the reason.
    said = outcome(run_dir)
    assert (said["exit_code"], said["reason"]) == (2, "bad_input")
    assert said["message"].startswith(f"process 1: {run_dir}: writing the run failed")
    before = states(run_dir)
    # The first turn of both; the other's second may have been cut off.
    assert len(before) in (2, 3)
    assert not (run_dir / "state").exists()

    done = run_on(setup, inputs, run_dir, kept, SHARD_BYTES=FEW_TOKENS)
    assert outcome(run_dir)["stage"] == "done", done.stderr
    after = states(run_dir)
    assert before.items() < after.items()
    # The last turn is one process's alone.
    assert len(after) % 2
    assert {line["wrapper"] for line in metrics(run_dir)} == {setup.wrapper}
    assert_same_lines(run_dir, one_process, "loss", "loss_depth_1", "loss_depth_2", "grad_norm")
    torch.testing.assert_close(head(run_dir), head(one_process), atol=1e-4, rtol=1e-4)


def states(run_dir: Path) -> dict[str, int]:
    """Return when each file of hidden states was written."""
    return {path.name: path.stat().st_mtime_ns for path in run_dir.glob("hidden/*/*.safetensors")}


def state(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Return a resume state: weights, moments and each parameter's own count of steps."""
    directory = run_dir / "state" / f"step-{step:08d}"
    counts = read_json(directory / "state.json")["optimizer"]
    return {
        **load_file(directory / "head.safetensors"),
        **load_file(directory / "optimizer.safetensors"),
        **{f"{name}.step": torch.tensor(count) for name, count in counts.items()},
    }


SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    # accelerate's own default, by which all but the first process would answer prompts with random weights.
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def lose_the_second_process(recipe: Path, **variables: str) -> str:
    """Start two processes without a launcher, of which the second kills itself; return what the first one said.

    No launcher ends the first one: it must end by itself and name the cause.
    """
    joined = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(CPU_SHARDS), str(recipe), "--json"],
            env=environment(RANK=rank, LOCAL_RANK=rank, **joined, **CPU, **variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL], said
    assert said[0].count("mtp-train: launcher: another process of this run is gone") == 1
    assert "Traceback" not in said[0]
    return said[0]


def test_one_process_goes_on_where_two_with_shards_were_lost(
    inputs: Path, one_process: Path, tmp_path: Path, new_run: Path
) -> None:
    run_dir = new_run
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, run_dir, **SHORT)
    lose_the_second_process(recipe, DIES=f"1:{DIES_BEFORE}", **SHARDED)
    assert ended(run_dir) == (1, "lost_process", "train")

    with contextlib.suppress(GateRefusedError):
        pipeline.run(load_recipe(recipe))
    assert {line["world_size"] for line in metrics(run_dir)} == {1, 2}
    torch.testing.assert_close(head(run_dir), head(one_process), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("mtp_train.runs.run:require_alike", "check"),
        ("mtp_train.runs.regeneration:answer_by_decoder", "data"),
        ("mtp_train.runs.training:hidden_cache", "train"),
        ("mtp_train.evaluation.decoding:decode_prompts", "evaluate"),
    ],
)
def test_a_process_that_is_lost_in_any_stage_is_named(
    place: str, stage: str, inputs: Path, tmp_path: Path, new_run: Path
) -> None:
    settings = {**SHORT, "data__regenerate": {"max_new_tokens": 4}, "train__hidden_cache": {}}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, new_run, **settings)
    lose_the_second_process(recipe, DIES_IN=f"1:{place}")
    assert ended(new_run) == (1, "lost_process", stage)
