"""A study as a recipe, from the stripped fine-tune to the findings, killed on the way and in two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launching import ROOT, metrics, outcome
from mtp_train import check
from mtp_train.evaluation.results import Report, load_report
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from mtp_train.runs import study as stages
from mtp_train.runs.study import CLAIM
from runs import run_quietly, tiny_recipe, write_inputs

STUDY: dict[str, Any] = {
    "data__regenerate": {"max_new_tokens": 12, "batch_size": 4},
    "train__max_steps": 3,
    "train__save_steps": 1,
    "evaluate__arms": ["graft", "retrained", "vanilla"],
    "evaluate__prompts": 4,
    "evaluate__max_new_tokens": 8,
    "export__enabled": False,
    "study": {"temperatures": [0.0, 1.0], "depths": [2], "batch": 4},
}
ARMS = ["none@finetune", "graft", "retrained-kl", "retrained-ce", "none@base", "vanilla"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("study") / "in")


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a study that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    done = run_quietly(tiny_recipe(inputs, run_dir, **STUDY))
    assert (done.exit_code, done.stage) == (0, "done")
    return run_dir


def test_a_study_leaves_what_a_run_leaves_and_its_findings(unbroken: Path) -> None:
    report = load_report(unbroken / "report.json")
    assert list(report.arms) == ARMS
    assert {cell.task for cell in report.cells if cell.arm == "graft"} == {"all", "held-out"}
    # All arms meet the same prompts.
    assert {cell.prompts for cell in report.cells if cell.arm in ARMS} == {4}
    pairs = {(one.first, one.second) for one in report.comparisons}
    assert len(pairs) == 6
    claims = [finding.statement for finding in report.findings]
    assert claims[0] == f"{CLAIM}."
    verdict, _, said = outcome(unbroken)["message"].partition(": ")
    assert verdict in ("Confirmed", "Refuted", "Undecided")
    assert said.lower().startswith(f"{CLAIM.lower()}. ")
    names = {path.name for path in unbroken.iterdir()}
    assert names >= {"recipe.yaml", "provenance.json", "report.html", "acceptance.csv", "figures"}
    assert not (unbroken / "export").exists()
    heads = {path.name: {inner.name for inner in path.iterdir()} for path in (unbroken / "heads").iterdir()}
    assert heads == {"kl": {"state", "head", "metrics.jsonl"}, "ce": {"state", "head", "metrics.jsonl"}}


def test_heads_differ_by_their_loss_alone(unbroken: Path) -> None:
    logged = {objective: metrics(unbroken / "heads" / objective) for objective in ("kl", "ce")}
    assert [line["step"] for line in logged["kl"]] == [line["step"] for line in logged["ce"]] == [1, 2, 3]
    assert [line["tokens"] for line in logged["kl"]] == [line["tokens"] for line in logged["ce"]]
    assert logged["kl"][0]["loss"] != logged["ce"][0]["loss"]
    # One set of responses for both.
    assert len(list((unbroken / "data").glob("responses-*"))) == 1


class KilledError(Exception):
    """Stands for the end of the process."""


def stable(report: Report) -> Any:
    """Return what does not depend on the clock."""
    figures = [
        (cell.arm, cell.task, cell.temperature, cell.rule, cell.tau, cell.overlap, cell.target_entropy)
        for cell in report.cells
    ]
    return figures, report.findings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call"), [("train_stage", 2), ("Study", 1), ("Study", 2), ("write_report", 1)])
def test_a_study_killed_in_any_stage_ends_the_same(
    name: str, call: int, inputs: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(inputs, tmp_path / "run", **STUDY)
    calls = {"count": 0}
    module = pipeline if name == "write_report" else stages
    whole: Callable[..., Any] = getattr(module, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        calls["count"] += 1
        if calls["count"] == call:
            raise KilledError
        return whole(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, killed)
        with pytest.raises(KilledError):
            run_quietly(recipe)
    run_quietly(recipe)
    assert stable(load_report(tmp_path / "run" / "report.json")) == stable(load_report(unbroken / "report.json"))
    # Finished: nothing is done again.
    monkeypatch.setattr("mtp_train.runs.run.gather_inputs", lambda *_: pytest.fail("run again"))
    run_quietly(recipe)


def test_check_plans_for_all_heads(inputs: Path, tmp_path: Path) -> None:
    both = check(tiny_recipe(inputs, tmp_path, **STUDY), processes=1)
    one = check(tiny_recipe(inputs, tmp_path, **{**STUDY, "study": {"objectives": ["kl"]}}), processes=1)
    assert "frozen); a study of kl, ce\n" in str(both)
    assert both.disk_bytes == 2 * one.disk_bytes
    assert "; a study of" not in str(check(tiny_recipe(inputs, tmp_path), processes=1))


@pytest.mark.slow
def test_the_demos_study_shows_a_stale_head_recovering(tmp_path: Path) -> None:
    """Smaller than the recipe, and with the same story."""
    recipe = load_recipe(
        ROOT / "recipes" / "vanilla_vs_distill.yaml",
        [
            f"run_dir={tmp_path / 'run'}",
            "data.regenerate.max_prompts=160",
            "data.regenerate.max_new_tokens=64",
            "train.max_steps=20",
            "train.tokens_per_step=1536",
            "evaluate.prompts=12",
            "evaluate.max_new_tokens=48",
            "study.temperatures=[0.0]",
            "study.rules=[greedy]",
            "track.wandb=off",
        ],
    )
    run_quietly(recipe)
    report = load_report(tmp_path / "run" / "report.json")
    deltas = [one.delta_tau_ci95 for one in report.comparisons if (one.first, one.second) == ("graft", "retrained-kl")]
    assert deltas
    assert all(ci95 is not None and ci95[1] < 0 for ci95 in deltas)
    assert report.lossless is not None
    assert report.lossless.faults == 0
