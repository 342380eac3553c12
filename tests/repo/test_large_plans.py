"""The tables of large trunks in ``recipes/distributed.md`` are what ``check`` computes from released configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_train import CheckResult
from scripts.what_fits import PAGE, SHAPES, STEP_TOKENS, cell, planned, table

SERVER = "http://localhost:8000/v1"
SERVED = {"train.states": {"endpoint": SERVER}}
TRUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-235B-A22B, here": ("Qwen3-235B-A22B", {}),
    "Qwen3-235B-A22B, served": ("Qwen3-235B-A22B", SERVED),
    "GLM-4.6 in FP8, served": ("GLM-4.6-FP8", SERVED),
}
"""The trunk, and whether a server computes the states."""


def plan(directory: Path, row: str) -> CheckResult:
    name, changes = TRUNKS[row]
    answers = {"data.regenerate.endpoint": SERVER, "gate.enabled": False}
    return planned(directory, name, 8, "h100", {**answers, **changes})


def embedding_bytes(row: str) -> int:
    """Return the bytes of all of a trunk that is not in its layers."""
    config = SHAPES[TRUNKS[row][0]]
    width = config["hidden_size"]
    return 2 * (2 * config["vocab_size"] + 1) * width


def received(row: str, found: CheckResult) -> float:
    """Return the bytes that a process in shards receives for each token of all of them.

    In each micro-batch they are layers and head in bf16, and in each step gradients of the head in fp32. An eighth is a
    process's own.
    """
    memory = found.memory
    layers = memory.trunk_bytes - embedding_bytes(row)
    of_head = (2 * found.plan.accumulation + 4) * memory.head_parameters
    return (found.plan.accumulation * layers + of_head) * 7 / 8 / STEP_TOKENS


def rows(directory: Path) -> Iterator[str]:
    for name in TRUNKS:
        found = plan(directory, name)
        memory = found.room.memory
        shards = found.room.in_shards
        assert shards is not None
        sizes = [f"{one.total_bytes / 2**30:.0f}" for one in (memory, shards)]
        yield f"| {' | '.join([name, *sizes, f'{memory.state_bytes:,}', f'{received(name, found) / 1e6:.2f}'])} |"


def test_the_page_has_the_plans_of_large_trunks(tmp_path: Path) -> None:
    expected = list(rows(tmp_path))
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(tuple(f"| {name}" for name in TRUNKS))] == expected, "\n".join(
        expected
    )


@pytest.mark.slow
def test_the_page_has_what_fits(tmp_path: Path) -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python scripts/what_fits.py --write"
    assert cell(planned(tmp_path, "Qwen3-32B", 1, "24GiB", {})) != "yes", "the control"


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B, here", "GLM-4.6 in FP8, served"])
def test_check_tells_what_moves(name: str, tmp_path: Path) -> None:
    found = plan(tmp_path, name)
    served = "served" in name
    config = SHAPES[TRUNKS[name][0]]
    width = config["hidden_size"]
    layers = config["num_hidden_layers"]
    told, shards, gib = str(found), found.room.in_shards, 2**30
    assert shards is not None
    assert f"\nhidden states: {2 * width:,} bytes a token, {2 * width * STEP_TOKENS / gib:.2f} GiB a step\n" in told
    embeddings = embedding_bytes(name)
    if served:
        assert found.memory.trunk_bytes == shards.trunk_bytes == embeddings
    else:
        in_layers = found.memory.trunk_bytes - embeddings
        assert shards.trunk_bytes == embeddings + in_layers // 8 + 2 * in_layers // layers
