"""A child process finds out what capturing would break, on a trunk of the same operations and next to no memory."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mtp_inference.capture_child
from mtp_inference import capture_probe
from mtp_inference.batch import Batch
from mtp_inference.capture_child import rebuilt_trunk, refused_rounds
from mtp_inference.capture_probe import ProbeSubject, ask_child, described, probe_subject, verdict, why_not_captured
from mtp_inference.sampling.chooser import Chooser
from mtp_train.trunk.load import Trunk
from recorded_graph import RecordedGraph, stand_in
from tiny import CACHE_KINDS, tiny_trunk

NUM_ROWS = 2


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Capture without a GPU, in few positions; return the graphs that are made."""
    stand_in(monkeypatch)
    monkeypatch.setattr(mtp_inference.capture_child, "GPU_CAPACITY_STEP", 32)
    return RecordedGraph.made


def sent(name: str) -> ProbeSubject:
    """Return what a child receives of a tiny trunk."""
    return ProbeSubject.from_bytes(probe_subject(tiny_trunk(name), NUM_ROWS).to_bytes())


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_a_child_captures_rounds_of_every_kind_of_cache(kind: str, graphs: list[RecordedGraph]) -> None:
    subject = sent(CACHE_KINDS[kind])
    trunk = rebuilt_trunk(subject)
    assert described(trunk) == subject.weights
    assert not [name for name, value in trunk.causal_lm.named_buffers() if value.is_meta]
    tried: list[str] = []
    assert refused_rounds(subject, tried.append) == {}
    assert tried == ["greedy", "greedy", "sampled", "sampled"]
    assert [graph.num_replays for graph in graphs] == [1, 1, 1, 1]


def test_the_weights_of_a_child_share_the_memory_of_the_largest() -> None:
    subject = sent("glm4_moe")
    trunk = rebuilt_trunk(subject)
    weights = list(trunk.parameters())
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    largest = max(weight.nbytes for weight in weights)
    assert weights[0].untyped_storage().nbytes() == largest < sum(weight.nbytes for weight in weights) / 3


def test_a_config_that_makes_another_trunk_is_no_answer() -> None:
    """As where an adapter or packed weights have taken a layer's place."""
    subject = sent("glm4_moe")
    with pytest.raises(ValueError, match="makes other weights"):
        rebuilt_trunk(subject._replace(weights={**subject.weights, "lora_A": ((4, 4), torch.float32)}))


def test_what_waits_for_the_host_is_named_by_the_kind_of_round(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_verify, stock_window = Chooser.verify, Batch.run_window

    def waiting_verify(self: Chooser, logits_BTV: torch.Tensor, *args: Any) -> Any:
        if self.rows.any_sampled:
            logits_BTV.sum().item()
        return stock_verify(self, logits_BTV, *args)

    def waiting_window(self: Batch, *args: Any) -> Any:
        self.length_B.tolist()
        return stock_window(self, *args)

    subject = sent("qwen3_5")
    monkeypatch.setattr(Chooser, "verify", waiting_verify)
    (kind,) = (found := refused_rounds(subject, print))
    assert kind == "sampled"
    assert "not permitted while a stream is capturing" in found[kind]
    stand_in(monkeypatch)
    monkeypatch.setattr(Batch, "run_window", waiting_window)
    assert refused_rounds(subject, print).keys() == {"greedy"}


ABOUT_TO = json.dumps({"capturing": "sampled"})


@pytest.mark.parametrize(
    ("code", "output", "refused"),
    [
        (0, f'{ABOUT_TO}\nsaid by a library\n{{"refused": {{"greedy": "it waits"}}}}', {"greedy": "it waits"}),
        (0, f'{ABOUT_TO}\n{{"refused": {{}}}}', {}),
        # What kills a process that captures would kill this one.
        (-6, ABOUT_TO, {"sampled": "a process that tried was ended by signal 6"}),
        # Before it came to that, or by an error of Python's: nothing is known.
        (-9, "", {}),
        (1, ABOUT_TO, {}),
        (1, "", {}),
    ],
)
def test_an_answer_is_what_the_child_found_or_died_of(code: int, output: str, refused: dict[str, str]) -> None:
    assert verdict(code, output, "Traceback\nMemoryError: none left") == refused


def test_a_child_is_asked_once_for_each_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ProbeSubject] = []

    def ask(subject: ProbeSubject) -> dict[str, str]:
        asked.append(subject)
        return {"sampled": "it waits"} if len(asked) == 1 else {"greedy": "it dies"}

    monkeypatch.setattr(capture_probe, "ask_child", ask)
    monkeypatch.setattr(capture_probe, "_refusals", {})
    first, second = tiny_trunk("glm4_moe"), tiny_trunk("qwen3_5")
    # Nothing is captured on other devices.
    assert why_not_captured(first, NUM_ROWS, True) is None
    assert asked == []
    monkeypatch.setattr(Trunk, "lm_head_VD", SimpleNamespace(device=torch.device("cuda", 0)))
    assert why_not_captured(first, NUM_ROWS, False) is None
    assert why_not_captured(first, NUM_ROWS, True) == "it waits"
    assert why_not_captured(tiny_trunk("glm4_moe", seed=1), NUM_ROWS, True) == "it waits"
    assert len(asked) == 1
    # What fails in every round fails in those that sample.
    assert [why_not_captured(second, NUM_ROWS, samples) for samples in (False, True)] == ["it dies"] * 2
    assert why_not_captured(second.bfloat16(), NUM_ROWS, False) == "it dies"
    assert len(asked) == 3
    # A trunk that no record makes cannot be rebuilt.
    first.family = replace(first.family, name="unheard_of")
    assert why_not_captured(first, NUM_ROWS, False) is None


REFUSES = """
import sys; sys.path[:0] = %r
import pytest, recorded_graph
from mtp_inference.batch import Batch
recorded_graph.stand_in(pytest.MonkeyPatch())
stock = Batch.run_window
def waits(self, *args):
    self.length_B.tolist()
    return stock(self, *args)
Batch.run_window = waits
from mtp_inference.capture_child import main; main()
"""


@pytest.mark.slow
def test_a_process_of_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_probe, "CHILD", REFUSES % [__file__.rpartition("/unit/")[0]])
    refused = ask_child(probe_subject(tiny_trunk("qwen3_5"), NUM_ROWS))
    assert "not permitted while a stream is capturing" in refused["greedy"]


def test_a_process_that_cannot_be_started_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert ask_child(sent("qwen3_5")) == {}
