"""Several nodes: two launchers over loopback, as two machines of a cluster start them, give the run that one gives."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from launching import (
    CPU_SHARDS,
    DEADLINE_SECONDS,
    MACHINES,
    assert_same_lines,
    assert_same_run,
    ended,
    environment,
    free_port,
    head,
    holding,
    launch,
    metrics,
    outcome,
    responses,
)
from runs import LEARNS, tree, write_inputs, write_recipe

pytestmark = pytest.mark.slow
DIES_BEFORE = 5
# Greedy answers in batches of two prompts, so that both processes have some.
SETTINGS = {
    **LEARNS,
    "data__regenerate": {**LEARNS["data__regenerate"], "batch_size": 2},
    "train__save_steps": 3,
    "train__log_steps": 1,
    "export__link": "copy",
}
DDP, NODES, TORCHRUN = "cpu_ddp.yaml", "fsdp2_nodes.yaml", "torchrun"
# As recipes/distributed.md has them.
SHARDS_BY_TORCHRUN = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that regenerates and passes the gate; every test gives it a run directory of its own."""
    inputs = write_inputs(tmp_path_factory.mktemp("nodes") / "in", num_records=48)
    return write_recipe(inputs / "recipe.yaml", inputs, inputs / "run", **SETTINGS)


@pytest.fixture(scope="module")
def one_node(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two processes under one launcher."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    done = launch("cpu_ddp.yaml", recipe, run_dir, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    return run_dir


def command_of(launcher: str, node: int, port: int) -> list[str]:
    """Return the launcher of one of two nodes with one process each, without the program."""
    if launcher == "torchrun":
        place = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *place]
    place = ["--machine_rank", str(node), "--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    words = ["--config_file", str(MACHINES / launcher), "--num_machines", "2", "--num_processes", "2", *place]
    return [sys.executable, "-m", "accelerate.commands.launch", *words]


def launch_nodes(launcher: str, recipe: Path, run_dirs: Sequence[Path], *words: str, **variables: str) -> list[Done]:
    """Start a recipe by two launchers, each in the parent of its run directory, and wait for both.

    ``launcher`` is torchrun, or the file that accelerate's launcher reads.
    """
    port = free_port()
    nodes = [
        subprocess.Popen(
            [*command_of(launcher, node, port), str(CPU_SHARDS), str(recipe), f"run_dir={run_dir}", *words, "--json"],
            env=environment(ACCELERATE_USE_CPU="true", **variables),
            cwd=run_dir.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, run_dir in enumerate(run_dirs)
    ]
    try:
        said = [node.communicate(timeout=DEADLINE_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
    return [Done(node.args, node.returncode, *texts) for node, texts in zip(nodes, said, strict=True)]


@pytest.mark.parametrize("launcher", [DDP, TORCHRUN])
def test_two_launchers_give_the_run_of_one(launcher: str, recipe: Path, one_node: Path, new_run: Path) -> None:
    run_dir = new_run
    first, second = launch_nodes(launcher, recipe, [run_dir, run_dir])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout) == {"run_dir": str(run_dir), **outcome(run_dir)}
    assert second.stdout == ""
    assert_same_run(run_dir, one_node)
    assert all(responses(run_dir, rank, world=2) for rank in (0, 1))


@pytest.mark.parametrize(("launcher", "lost"), [(DDP, 1), (TORCHRUN, 0)])
def test_a_lost_node_ends_the_run_and_the_same_commands_resume_it(
    launcher: str, lost: int, recipe: Path, one_node: Path, new_run: Path
) -> None:
    """Each node has one process, which no launcher of its own ends when the process of the other node is killed."""
    run_dir = new_run
    both = launch_nodes(launcher, recipe, [run_dir, run_dir], DIES=f"{lost}:{DIES_BEFORE}")
    assert [done.returncode for done in both] == [1, 1], both
    said = [done.stderr.count("mtp-train: launcher: another process of this run is gone") for done in both]
    assert said == [int(node != lost) for node in (0, 1)], both
    assert ended(run_dir) == (1, "lost_process", "train")
    again = launch_nodes(launcher, recipe, [run_dir, run_dir])
    assert [done.returncode for done in again] == [0, 0], again
    assert_same_run(run_dir, one_node)


@pytest.mark.parametrize(("launcher", "variables"), [(NODES, {}), (TORCHRUN, SHARDS_BY_TORCHRUN)])
def test_nodes_share_one_trunk_in_shards(
    launcher: str, variables: dict[str, str], recipe: Path, one_node: Path, new_run: Path
) -> None:
    run_dir = new_run
    both = launch_nodes(launcher, recipe, [run_dir, run_dir], **variables)
    assert [done.returncode for done in both] == [0, 0], both
    assert {(line["world_size"], line["wrapper"]) for line in metrics(run_dir)} == {(2, "FSDPHeadTraining")}
    assert_same_lines(run_dir, one_node, "loss")
    torch.testing.assert_close(head(run_dir), head(one_node), atol=1e-3, rtol=1e-3)


def test_nodes_that_do_not_share_the_run_directory_are_refused(recipe: Path, tmp_path: Path) -> None:
    ours = tmp_path / "a"
    theirs = tmp_path / "b"
    both = launch_nodes(DDP, recipe, [ours, theirs], ATTEMPTS="1")
    assert [done.returncode for done in both] == [1, 1], both
    message = f"run_dir: {ours}: processes 0 and 1 see different files (run.lock); expected one directory"
    assert both[0].stderr.count(f"mtp-train: {message}") == 1, both[0].stderr
    found = outcome(ours)
    assert ended(ours) == (2, "bad_input", "check")
    assert found["message"].startswith(message)
    assert list(tree(ours)) == ["outcome.json"]


def test_a_directory_that_another_run_holds_is_left_alone_by_every_node(recipe: Path, new_run: Path) -> None:
    run_dir = new_run
    with holding(run_dir) as holder:
        (run_dir / "outcome.json").write_text(json.dumps({"message": "of the other run"}))
        before = tree(run_dir)
        both = launch_nodes(DDP, recipe, [run_dir, run_dir])
        assert tree(run_dir) == before
    assert [done.returncode for done in both] == [1, 1], both
    assert f"is in use by process {holder.pid} on {socket.gethostname()}" in both[0].stderr
    assert "Traceback" not in both[1].stderr.partition("torch/distributed/elastic")[0]
