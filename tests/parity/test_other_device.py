"""What is on a device stays there: the decoder and whole jobs, on one that refuses tensors of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launching import environment, told_by
from simulated_device import AVAILABLE, DEVICE
from tiny import CACHE_KINDS

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this torch takes no device that is written in Python")
# One that grows, one that is taken back.
TELLING = ("full", "recurrent")


ANSWERED = {"data__regenerate": {"max_new_tokens": 8}}
# Not bf16: the simulated device has no casts of autocast for the head's products.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"train__select": {"every_steps": 1, "share": 0.3}},
    {"train__hidden_cache": {}},
    {"head__lora": {"r": 4, "alpha": 8}},
    {"head__draft_vocab": 40, "objective__loss": "tv"},
    {"objective__unroll": "fastmtp", "objective__loss": "ce"},
    {"objective__loss": "e2e_tv"},
    {"objective__loss": "lk"},
    {"data__pack": True, "objective__loss": "reverse_kl"},
    {"data__loss_positions": 8},
)


def on_the_device(directory: Path, **asked: object) -> dict[str, Any]:
    """Return what ``simulated_jobs.py`` found."""
    return told_by("simulated_jobs.py", directory, json.dumps(asked), env=environment())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found of everything that the fast tier asks."""
    return on_the_device(tmp_path_factory.mktemp("device"), refusals=[], waits=[], decode=TELLING, job=ANSWERED)


def test_a_tensor_of_the_cpu_is_refused_there(found: dict[str, Any]) -> None:
    said = found["refusals"]
    added, selected = said["refused"]
    assert "add.Tensor: CPU tensors of shapes [(3,)] beside" in added
    assert "index_select" in selected
    assert (said["allowed"], said["devices"]) == ([2.0], [DEVICE, "cpu"])


def test_a_training_step_waits_for_the_device_once(found: dict[str, Any]) -> None:
    """For the losses, the gradient norm and other processes' signals together; nothing else needs a value."""
    waits = found["waits"]
    once = ["loop.gather: tolist"]
    for given in ("the trunk", "states", "experts", "positions"):
        assert waits[f"with {given}"] == [once]
    # Two micro-batches: documents that are looked at on the device, and target rows that are looked for there.
    looked = ["states.isolated_hidden: _to_copy", "chunked.frozen_head_loss: nonzero"]
    assert waits["unknown"] == [[*looked, *looked, *once]]
    assert [set(places) for places in waits["in order"]] == [{"head_training.<lambda>: _to_copy", *once}]


def check_decoded(decoded: dict[str, Any], kinds: tuple[str, ...]) -> None:
    assert decoded.keys() == set(kinds)
    for on_cpu, there in decoded.values():
        assert on_cpu == there


def test_caches_decode_there_as_on_the_cpu(found: dict[str, Any]) -> None:
    check_decoded(found["decode"], TELLING)


@pytest.mark.slow
def test_every_kind_of_cache_decodes_there_as_on_the_cpu(tmp_path: Path) -> None:
    kinds = tuple(kind for kind in CACHE_KINDS if kind not in TELLING)
    check_decoded(on_the_device(tmp_path, decode=kinds)["decode"], kinds)


def check_job(found: dict[str, Any]) -> None:
    assert found["codes"] == [0, 0]
    assert found["rounds"] > 0
    assert len(set(found["devices"])) == 1, found["devices"]


def test_a_job_runs_there_up_to_its_evaluation(found: dict[str, Any]) -> None:
    check_job(found["job"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings))
def test_jobs_of_other_settings_run_there_up_to_their_evaluation(settings: dict[str, Any], tmp_path: Path) -> None:
    check_job(on_the_device(tmp_path, job=settings)["job"])
