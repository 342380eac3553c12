"""Recipes as users start them: real processes under accelerate's launcher, and what they leave behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from json_files import read_json
from mtp_train.checkpoints.artifact import WEIGHTS_FILE
from mtp_train.checkpoints.writing import LOCK_FILE
from repository import RECIPES, REPOSITORY
from runs import tree

CPU_SHARDS = REPOSITORY / "tests" / "cpu_shards.py"
MACHINES = RECIPES / "accelerate"
DEADLINE_SECONDS = 600.0
COMMAND_LINE = ("-m", "mtp_train")
# OMP_NUM_THREADS=1 of a launched process counts as the launcher's default.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def environment(**variables: str) -> dict[str, str]:
    """Return this environment without what a launcher set in it, and without an accelerator."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    found = filter(None, (os.environ.get("PYTHONPATH"),))
    paths = os.pathsep.join([*map(str, (REPOSITORY, REPOSITORY / "inference", REPOSITORY / "tests")), *found])
    return {**kept, "PYTHONPATH": paths, **ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", **variables}


def start(
    machine: str, *program: object, flags: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Start a program with accelerate's launcher and wait for it."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(MACHINES / machine), *flags]
    return subprocess.run(
        [*launcher, *map(str, program)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )


def told_by(program: str, *words: object, env: Mapping[str, str]) -> Any:
    """Run a program of this directory, and return the JSON document in its last line."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / program, *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HOLDS = """
import sys
from filelock import SoftFileLease
lock = SoftFileLease(sys.argv[1], lease_duration=30)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold a run directory, as a run does, until the block ends or it is killed."""
    run_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLDS, str(run_dir / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def launch(machine: str, recipe: Path, run_dir: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a recipe with accelerate's launcher and wait for it."""
    return start(machine, *COMMAND_LINE, recipe, f"run_dir={run_dir}", "--json", **variables)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def outcome(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(run_dir / "outcome.json")
    return found


def ended(run_dir: Path) -> tuple[int, str, str]:
    """Return exit code, reason and stage of a run's last attempt."""
    found = outcome(run_dir)
    return found["exit_code"], found["reason"], found["stage"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def head(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "head" / WEIGHTS_FILE)


def responses(run_dir: Path, rank: int = 0, world: int = 1) -> list[str]:
    """Return the responses that a process has stored so far, sorted."""
    paths = run_dir.glob(f"data/*/regenerated-{rank:05d}-of-{world:05d}.jsonl")
    return sorted(line for path in paths for line in path.read_text().splitlines())


def assert_same_lines(run_dir: Path, expected: Path, *fields: str, within: float = 1e-4) -> None:
    """Check that two runs logged the same steps, up to the order of sums."""
    lines = metrics(run_dir), metrics(expected)
    for field in fields:
        ours, theirs = ({line["step"]: line[field] for line in some if field in line} for some in lines)
        assert theirs, field
        assert ours == pytest.approx(theirs, abs=within), field


LOGGED = ("step", "loss", "loss_depth_1", "loss_depth_2", "lr", "tokens", "world_size", "wrapper")


def assert_same_run(run_dir: Path, expected: Path) -> None:
    """Check that responses, log, head and export are an unbroken run's, bit for bit, and that no scrap is left."""
    for found, whole in zip(*(list(left_by(path)) for path in (run_dir, expected)), strict=True):
        assert found == whole


def left_by(run_dir: Path) -> Iterator[Any]:
    """Yield all that a run leaves but what a clock decides, in forms that can be compared."""
    yield {path.name for path in run_dir.iterdir()}
    yield {path.name: sorted(path.read_text().splitlines()) for path in run_dir.glob("data/*/regenerated-*.jsonl")}
    yield [[line[field] for field in LOGGED] for line in metrics(run_dir)]
    yield {name: value.numpy().tobytes() for name, value in head(run_dir).items()}
    yield outcome(run_dir)["exit_code"], read_json(run_dir / "report.json")["arms"]["retrained"]["tau"]
    files = tree(run_dir / "export")
    # The model card names speeds, which no two runs share.
    assert files.pop("README.md") is not None
    yield files


SPEEDS = ("speed", "second", "round", "break_even", "cost")


def without_speed(found: Any) -> Any:
    """Return the part of a report that no clock decides."""
    if isinstance(found, list):
        return [without_speed(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {key: without_speed(one) for key, one in found.items() if not any(word in key for word in SPEEDS)}


class Setup(NamedTuple):
    """A machine setting, and the facts that a run on two of its processes must log."""

    machine: str
    distributed_type: str
    wrapper: str
    variables: dict[str, str]


CPU = {"ACCELERATE_USE_CPU": "true"}
DDP = Setup("cpu_ddp.yaml", "MULTI_CPU", "DistributedDataParallel", CPU)
FSDP2 = Setup("fsdp2.yaml", "FSDP", "FSDPHeadTraining", CPU)
ZERO2 = Setup("zero2.yaml", "DEEPSPEED ZeRO-2", "DeepSpeedEngine", {})
ZERO3 = Setup("zero3.yaml", "DEEPSPEED ZeRO-3", "DeepSpeedEngine", {})
# On CPUs it compiles its communication.
with_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which(os.environ.get("CXX", "c++")) is None,
    reason="deepspeed: not installed, or no C++ compiler",
)


def cases(*setups: Setup) -> pytest.MarkDecorator:
    """Run a test on each set-up; set-ups of DeepSpeed are skipped by name if it is not installed."""
    return pytest.mark.parametrize(
        "setup",
        [
            pytest.param(one, id=one.machine, marks=with_deepspeed if one.wrapper == "DeepSpeedEngine" else ())
            for one in setups
        ],
    )
