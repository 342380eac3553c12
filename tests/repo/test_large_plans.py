"""The table of large trunks in ``recipes/distributed.md`` is what ``check`` computes from their released configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from json_files import read_json, write_json
from mtp_train import CheckResult, check
from repository import RECIPES, REPOSITORY

PAGE = RECIPES / "distributed.md"
SEQ_LEN, STEP_TOKENS = 4096, 131_072
SHAPES: dict[str, Any] = read_json(REPOSITORY / "tests" / "large_trunks.json")
"""What the released configs have of the shapes, without what changes no plan."""
QWEN3_5_9B: dict[str, Any] = read_json(REPOSITORY / "inference" / "benchmarks" / "qwen3_5_9b.json")
TRUNKS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "Qwen3.5-9B, here": (QWEN3_5_9B, "native", False),
    "Qwen3-235B-A22B, here": (SHAPES["Qwen3-235B-A22B"], "random", False),
    "Qwen3-235B-A22B, served": (SHAPES["Qwen3-235B-A22B"], "random", True),
    "GLM-4.6 in FP8, served": (SHAPES["GLM-4.6-FP8"], "native", True),
}
"""Config, start of the head, and whether a server computes the states."""


def planned(directory: Path, name: str, processes: int) -> CheckResult:
    config, init, served = TRUNKS[name]
    trunk = directory / "trunk"
    trunk.mkdir(exist_ok=True)
    write_json(trunk / "config.json", config)
    (directory / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    server = {"endpoint": "http://localhost:8000/v1"}
    recipe = {
        "run_dir": str(directory / "run"),
        "model": {"trunk": str(trunk)},
        "head": {"num_depths": 3, "init": init},
        "data": {
            "sources": [{"path": str(directory / "prompts.jsonl")}],
            "seq_len_tokens": SEQ_LEN,
            "regenerate": {**server, "max_prompts": 20_000},
        },
        "train": {
            **{"max_steps": 500, "tokens_per_step": STEP_TOKENS, "lr": 1e-4, "micro_batch_sequences": 1},
            "states": server if served else None,
        },
        "evaluate": {"arms": ["none", *(["native"] if init == "native" else []), "retrained"]},
        "gate": {"enabled": False},
    }
    return check(recipe, processes=processes, device="h100")


def received(found: CheckResult) -> float:
    """Return the bytes that a process in shards receives for each token of all of them."""
    shards = found.room.in_shards
    assert shards is not None
    return (shards.step_bytes + found.plan.accumulation * shards.pass_bytes) / STEP_TOKENS


def rows(directory: Path) -> Iterator[str]:
    for name in TRUNKS:
        for processes in (1, 8, 16):
            found = planned(directory, name, processes)
            room, shards = found.room, found.room.in_shards
            in_shards = "-" if shards is None else f"{shards.total_bytes / 2**30:.0f}"
            moved = "-" if shards is None else f"{received(found) / 1e6:.2f}"
            fits = "no" if room.problem else "in shards" if room.needs_shards else "yes"
            cells = (name, processes, f"{room.memory.total_bytes / 2**30:.0f}", in_shards, fits)
            yield "| " + " | ".join(map(str, (*cells, f"{room.memory.state_bytes:,}", moved))) + " |"


def test_the_page_has_the_plans_of_large_trunks(tmp_path: Path) -> None:
    expected = list(rows(tmp_path))
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(tuple(f"| {name}" for name in TRUNKS))] == expected, "\n".join(
        expected
    )


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B, here", "GLM-4.6 in FP8, served"])
def test_check_tells_what_moves(name: str, tmp_path: Path) -> None:
    found = planned(tmp_path, name, 8)
    config, _, served = TRUNKS[name]
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    told, shards, gib = str(found), found.room.in_shards, 2**30
    assert shards is not None
    assert f"\nhidden states: {2 * width:,} bytes a token, {2 * width * STEP_TOKENS / gib:.2f} GiB a step\n" in told
    # bf16 weights in each of four micro-batches, and gradients in fp32, of which an eighth is a process's own.
    head = (4 * 2 + 4) * found.memory.head_parameters * 7 / 8
    assert shards.step_bytes == pytest.approx(head)
    assert f"each process: {head / gib:.2f} GiB of the head and its gradients in a step" in told
    embeddings = 2 * config["vocab_size"] * width + width
    if served:
        assert shards.pass_bytes == 0
        assert found.memory.trunk_bytes == shards.trunk_bytes == 2 * embeddings
        assert " of layers in each" not in told
    else:
        parameters = found.memory.trunk_parameters - embeddings
        assert shards.pass_bytes == 2 * parameters * 7 // 8
        assert shards.trunk_bytes == 2 * (embeddings + parameters // 8 + 2 * parameters // layers)
        assert f"step; {shards.pass_bytes / gib:.2f} GiB of layers in each pass, 4 a step or more\n" in told
