"""A trunk that two processes share decodes as it does in one: every kind of cache, drafts, sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launching import ROOT, start
from mtp_train.trunk.tensor_parallel import cuts_anything, part_bytes
from mtp_train.upstream.transformers_private import splits_models
from split_trunks import decoded
from tiny import ALL_FAMILIES, family_of, tiny_trunk

pytestmark = pytest.mark.skipif(not splits_models(), reason="transformers cannot load a part of a model")
WITHOUT_PLAN = ("gpt_oss", "hunyuan_v1_dense")
SPLIT = [name for name in ALL_FAMILIES if family_of(name).trunk.tensor_parallel and name not in WITHOUT_PLAN]


def measured(names: list[str], directory: Path) -> dict[str, Any]:
    """Return what two processes find."""
    into = directory / "found.json"
    program = ROOT / "tests" / "split_trunks.py"
    done = start("cpu_ddp.yaml", program, into, *names, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(into.read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes decode with a trunk that has recurrent layers, and with a mixture."""
    return measured(["qwen3_5", "glm4_moe"], tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_two_processes_decode_as_one_does(name: str, found: dict[str, Any]) -> None:
    first, second = found[name]
    assert first["decoded"] == second["decoded"]
    assert_as_one(name, first)
    assert second["held"] == first["held"]


def assert_as_one(name: str, first: dict[str, Any]) -> None:
    """Check the texts and the number of weights of a group's first process."""
    trunk = tiny_trunk(name)
    for texts in first["decoded"].values():
        assert texts["drafted"] == texts["plain"]
    assert first["decoded"] == decoded(trunk)
    assert first["held"] == part_bytes(trunk.causal_lm, 1, 2)
    assert first["held"] < part_bytes(trunk.causal_lm, 1, 1)


def test_greedy_and_sampled_texts_differ(found: dict[str, Any]) -> None:
    """Otherwise their equality would show half of what it says."""
    texts = found["qwen3_5"][0]["decoded"]
    assert texts["greedy"]["plain"] != texts["sampled"]["plain"]


def test_processes_with_other_requests_are_refused(found: dict[str, Any]) -> None:
    """They do not wait for one another for good."""
    for one in found["qwen3_5"]:
        assert one["other_requests"].startswith(
            "tensor parallel: process 1 of a group got other requests than its first"
        )


def test_a_process_that_would_choose_other_tokens_follows_the_first(found: dict[str, Any]) -> None:
    first, second = found["qwen3_5"]
    assert (first["parted"]["changed"], second["parted"]["changed"] > 0) == (0, True)
    assert second["parted"]["texts"] == first["parted"]["texts"] == first["decoded"]["greedy"]["plain"]


@pytest.mark.slow
def test_every_family_with_a_plan_decodes_as_one_process_does(tmp_path: Path) -> None:
    found = measured(SPLIT, tmp_path)
    assert list(found) == SPLIT
    for name, (first, second) in found.items():
        assert first["decoded"] == second["decoded"], name
        assert_as_one(name, first)


def test_families_without_a_plan_are_known() -> None:
    assert not any(cuts_anything(tiny_trunk(name).causal_lm) for name in WITHOUT_PLAN)
