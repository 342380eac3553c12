"""The script for half an hour with a GPU runs each part by itself, and keeps what the parts before a failure found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from json_files import read_json
from launching import environment
from repository import REPOSITORY


def measured(out: Path, *words: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the script on the CPU; return its exit status and the result of each part."""
    command = [REPOSITORY / "scripts" / "measure_gpu.sh", "--device", "cpu", "--out", out, *words]
    settings = environment(PYTHON=sys.executable)
    settings.pop("MTP_REAL_MODEL", None)
    done = subprocess.run([*map(str, command)], env=settings, check=False, stdout=subprocess.DEVNULL)
    return done.returncode, {path.stem: read_json(path) for path in out.glob("*.json")}


def test_a_part_that_fails_costs_no_other_one(tmp_path: Path) -> None:
    # The tokens of a step are no multiple of this length.
    code, found = measured(tmp_path, "--parts", "step,machine", "--seq-len", "33")
    assert (code, found["step"]["status"], found["machine"]["status"]) == (1, "failed", "done")
    assert found["step"]["result"]["parts"]["step"]["failed"].startswith("RecipeError: train.tokens_per_step")
    assert found["machine"]["result"]["parts"]["machine"]["4 x 128 x 2048"]["ms"] > 0
    assert "RecipeError" in (tmp_path / "step.log").read_text()


def test_a_part_that_runs_out_of_time_or_cannot_run_is_named(tmp_path: Path) -> None:
    code, found = measured(tmp_path, "--parts", "machine,fsdp2,real", "--limit", "0.5")
    assert code == 1
    assert {part: (one["status"], one["reason"]) for part, one in found.items()} == {
        "machine": ("timed out", ""),
        "fsdp2": ("skipped", "accelerate shards on GPUs only"),
        "real": ("skipped", "MTP_REAL_MODEL names no checkpoint"),
    }


def test_an_unknown_part_is_refused_before_any_runs(tmp_path: Path) -> None:
    assert measured(tmp_path, "--parts", "machine,step2") == (2, {})


def test_all_parts_together_take_27_minutes_at_most() -> None:
    command = [str(REPOSITORY / "scripts" / "measure_gpu.sh"), "--limits"]
    limits = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert sum(int(line.split()[1]) for line in limits) <= 27 * 60


@pytest.mark.slow
def test_all_parts_that_a_cpu_can_run_are_rehearsed(tmp_path: Path) -> None:
    code, found = measured(tmp_path, "--limit", "600")
    skipped = {part for part, one in found.items() if one["status"] == "skipped"}
    assert (code, skipped) == (0, {"fsdp2", "real", "engine"})
    cells = {part: one["result"]["parts"][part] for part, one in found.items() if one["result"]}
    assert cells.keys() | {"tests"} == found.keys() - skipped
    assert "skipped" in found["tests"]["last_line"]
    assert cells["profile"]["depth 3"]["launches"] > cells["profile"]["depth 0"]["launches"] > 100
    assert len(cells["contexts"]) == 8
    rows = {name: cell["chunk_rows"] for name, cell in cells["step"].items() if name.startswith("chunks of")}
    assert rows == {f"chunks of {count} rows": count for count in (384, 768, 1536)}
    assert cells["step"]["chunks of 1536 rows"]["planned_bytes"] > cells["step"]["as shipped"]["planned_bytes"]
