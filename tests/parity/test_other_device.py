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


def on_the_device(*words: object) -> Any:
    """Return what ``simulated_jobs.py`` found."""
    return told_by("simulated_jobs.py", *words, env=environment())


def test_a_tensor_of_the_cpu_is_refused_there() -> None:
    found = on_the_device("refusals")
    added, selected = found["refused"]
    assert "add.Tensor: CPU tensors of shapes [(3,)] beside" in added
    assert "index_select" in selected
    assert (found["allowed"], found["devices"]) == ([2.0], [DEVICE, "cpu"])


def test_a_training_step_waits_for_the_device_once(tmp_path: Path) -> None:
    """For the losses, the gradient norm and other processes' signals together; nothing else needs a value."""
    found = on_the_device("waits", tmp_path)
    once = ["loop.gather: tolist"]
    assert found["with the trunk"] == found["with states"] == found["with experts"] == [once]
    # Two micro-batches: documents that are looked at on the device, and target rows that are looked for there.
    looked = ["isolate.isolated_hidden: _to_copy", "chunked.frozen_head_loss: nonzero"]
    assert found["unknown"] == [[*looked, *looked, *once]]
    assert [set(places) for places in found["in order"]] == [{"feed.<lambda>: _to_copy", *once}]


@pytest.mark.parametrize(
    "kinds",
    [TELLING, *(pytest.param([kind], marks=pytest.mark.slow) for kind in CACHE_KINDS if kind not in TELLING)],
    ids=" ".join,
)
def test_every_kind_of_cache_decodes_there_as_on_the_cpu(kinds: list[str]) -> None:
    found = on_the_device("decode", *kinds)
    assert found.keys() == set(kinds)
    for on_cpu, there in found.values():
        assert on_cpu == there


@pytest.mark.parametrize(
    "settings",
    [
        {"data__regenerate": {"enabled": True, "max_new_tokens": 8}},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                {"train__precision": "bf16"},
                {"train__select": {"every_steps": 1, "share": 0.3, "prompts": 2}},
                {"train__hidden_cache": {"max_gib": 0.01}},
                {"head__lora": {"r": 4, "alpha": 8}},
                {"head__draft_vocab": 40, "objective__vocab": "draft", "objective__loss": "tv"},
                {"objective__unroll": "fastmtp", "objective__loss": "ce"},
                {"objective__loss": "e2e_tv"},
                {"objective__loss": "lk", "objective__on_policy": True},
                {"data__pack": True, "objective__loss": "reverse_kl"},
            )
        ),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_jobs_run_there_up_to_their_evaluation(settings: dict[str, Any], tmp_path: Path) -> None:
    found = on_the_device("job", tmp_path, json.dumps(settings))
    assert found["codes"] == [0, 0]
    assert found["rounds"] > 0
    assert len(set(found["devices"])) == 1, found["devices"]
