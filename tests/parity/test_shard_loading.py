"""A trunk that processes load in shards equals one that each of them loads whole and shards, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from json_files import read_json
from launching import start
from repository import REPOSITORY
from tiny import ALL_FAMILIES

# A mixture, whose experts are stored one by one and merged; recurrent layers; one matrix for embedding and lm_head.
CASES = ("glm4_moe", "glm4_moe, bfloat16", "qwen3_5", "qwen3_5, tied")


def measured(cases: tuple[str, ...], directory: Path) -> dict[str, Any]:
    """Return what two processes find."""
    into = directory / "found.json"
    program = REPOSITORY / "tests" / "shard_loading.py"
    two = ("--num_processes", "2")
    done = start("fsdp2.yaml", program, into, *cases, flags=two, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    return read_json(into)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(CASES, tmp_path_factory.mktemp("loaded"))


def assert_equal_shards(one: dict[str, Any], case: str) -> None:
    assert one["differences"] == [], case
    # One changed number is noticed.
    assert one["then_different"] == one["changed"], case
    assert (one["sharded"] > 0, one["unsharded"]) == (True, 0), case


@pytest.mark.parametrize("case", CASES)
def test_shards_equal_those_of_a_whole_trunk(case: str, found: dict[str, Any]) -> None:
    for one in found["compared"][case]:
        assert_equal_shards(one, case)


@pytest.mark.parametrize("case", CASES)
def test_a_process_holds_its_shard_and_one_layer(case: str, found: dict[str, Any]) -> None:
    for one in found["compared"][case]:
        most = one["shard"] + one["layer"]
        assert one["shard"] < one["now"] <= most
        # Loading the whole trunk first needs more.
        assert one["before"] == one["whole"] > most


def test_a_file_damaged_for_one_process_ends_all_with_its_error(found: dict[str, Any]) -> None:
    first, second = found["errors"]
    assert first == second
    assert first.startswith("process 1: ")
    assert "a file of the trunk cannot be read" in first


@pytest.mark.slow
def test_every_family_is_loaded_in_shards(tmp_path: Path) -> None:
    both = tuple(f"{name}{end}" for name in ALL_FAMILIES for end in ("", ", bfloat16"))
    compared = measured(both, tmp_path)["compared"]
    assert tuple(compared) == both
    for case, processes in compared.items():
        for one in processes:
            assert_equal_shards(one, case)
            assert one["now"] <= one["shard"] + one["layer"], case
