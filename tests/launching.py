"""Recipes as users start them: real processes under accelerate's launcher, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.checkpoints.artifact import WEIGHTS_FILE

ROOT = Path(__file__).parents[1]
MACHINES = ROOT / "recipes" / "accelerate"
DEADLINE_SECONDS = 600.0
COMMAND_LINE = ("-m", "mtp_train")
# OMP_NUM_THREADS=1 of a launched process counts as the launcher's default.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def environment(**variables: str) -> dict[str, str]:
    """Return this environment without what a launcher set in it, and without an accelerator."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    found = filter(None, (os.environ.get("PYTHONPATH"),))
    paths = os.pathsep.join([*map(str, (ROOT, ROOT / "inference", ROOT / "tests")), *found])
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
        [sys.executable, ROOT / "tests" / program, *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def launch(machine: str, recipe: Path, run_dir: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a recipe with accelerate's launcher and wait for it."""
    return start(machine, *COMMAND_LINE, recipe, f"run_dir={run_dir}", "--json", **variables)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def outcome(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "outcome.json").read_text())
    return found


def head(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "head" / WEIGHTS_FILE)


def responses(run_dir: Path, rank: int = 0, world: int = 1) -> list[str]:
    """Return the responses that a process has stored so far, sorted."""
    paths = run_dir.glob(f"data/*/regenerated-{rank:05d}-of-{world:05d}.jsonl")
    return sorted(line for path in paths for line in path.read_text().splitlines())


def assert_same_lines(run_dir: Path, expected: Path, *fields: str) -> None:
    """Check that two runs logged the same steps, up to the order of sums."""
    lines = metrics(run_dir), metrics(expected)
    for field in fields:
        ours, theirs = ({line["step"]: line[field] for line in some if field in line} for some in lines)
        assert theirs, field
        assert ours == pytest.approx(theirs, abs=1e-4), field
