"""A suggested draft vocabulary on its way to the user: ``evaluate``, a run, and an evaluation of the run's head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtp_inference.drafters.drafter import DrafterMaker
from mtp_train.evaluation import costs, draft_vocab, run
from mtp_train.evaluation.cells import load_study
from mtp_train.evaluation.results import load_report
from mtp_train.report.study_table import study_summary
from mtp_train.report.table import summary
from mtp_train.trunk.load import Trunk
from rendering import printed
from runs import LEARNS, document, run_quietly, tiny_recipe, write_inputs

SIZES = (16, 64)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small vocabularies large ones, whose output matrix takes most of a round's time."""

    def times(
        trunk: Trunk, maker: DrafterMaker, sizes: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> dict[int, float]:
        assert len(prompts) == 1
        assert tuple(sizes) == SIZES
        return {len(trunk.lm_head_VD): 1.0, **dict.fromkeys(sizes, 0.0)}

    monkeypatch.setattr(costs, "output_times", times)
    monkeypatch.setattr(draft_vocab, "SIZES", SIZES)
    monkeypatch.setattr(draft_vocab, "MIN_GROUPS", 2)
    monkeypatch.setattr(draft_vocab, "MIN_ACCEPTED", 1)
    # Few groups have a wide interval.
    monkeypatch.setattr(draft_vocab, "LEAST_GAIN", -1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_latency", lambda *_unused, **_also_unused: ())
    monkeypatch.setattr(run, "head_costs", partial(run.head_costs, prefill_tokens=32, repeats=1))


def command(subject: object, out: Path) -> list[Any]:
    small = ["--prompts-per-task", 4, "--depths", 2, "--temperatures", 0, "--max-new-tokens", 24]
    return ["evaluate", subject, *small, "--out", out]


def test_evaluate_suggests_a_vocabulary_in_the_report_on_the_page_and_in_the_terminal(
    tmp_path: Path, large: None, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    report = document(command("demo:base", out), capfd)
    (found,) = report["draft_vocab"]
    assert found["size"] in SIZES, found["reason"]
    assert found["override"] == f"head.draft_vocab={found['size']}"
    assert found["counted_on"] == "the trunk's answers to the other groups of prompts"
    assert [one["size"] for one in found["sizes"]] == list(SIZES)
    assert load_study(out / "report.json").to_json() == report
    assert found["override"] in (out / "report.html").read_text(encoding="utf-8")
    assert f"Draft vocabulary\n{found['reason']}" in printed(study_summary(load_study(out / "report.json")), width=400)


def test_a_small_vocabulary_is_named_as_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = document(command("demo:base", tmp_path / "out"), capfd)["draft_vocab"]
    assert (found["size"], found["override"], found["sizes"]) == (None, None, [])
    assert found["reason"].startswith("None suggested: the vocabulary of 2,048 tokens is small.")


@pytest.mark.slow
def test_a_run_suggests_by_its_training_text_and_so_does_an_evaluation_of_its_head(
    tmp_path: Path, large: None, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs, run_dir = write_inputs(tmp_path), tmp_path / "run"
    run_quietly(tiny_recipe(inputs, run_dir, **LEARNS))
    report = load_report(run_dir / "report.json")
    (found,) = report.draft_vocab
    assert (found.arm, found.size in SIZES, found.counted_on) == ("retrained", True, "the training text")
    assert found.override in (run_dir / "report.html").read_text(encoding="utf-8")
    assert f"Draft vocabulary: {found.reason}" in printed(summary(report), width=400)
    evaluation = [*command(run_dir, tmp_path / "out"), "--suite", inputs / "chats.jsonl"]
    (later,) = document(evaluation, capfd)["draft_vocab"]
    assert (later["counted_on"], later["counted_tokens"]) == ("the head's training text", found.counted_tokens)


@pytest.mark.slow
def test_a_study_that_was_measured_before_there_were_suggestions_goes_on_without_one(
    tmp_path: Path, large: None, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert document(command("demo:base", out), capfd)["draft_vocab"]
    (kept,) = out.glob("measured/*/costs.json")
    measured = json.loads(kept.read_text(encoding="utf-8"))
    del measured["draft_head"]
    kept.write_text(json.dumps(measured))
    (out / "report.json").unlink()
    assert document(command("demo:base", out), capfd)["draft_vocab"] == []
