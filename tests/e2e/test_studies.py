"""``evaluate`` and ``compare`` from the command line, and a recipe of a study up to its findings, killed on the way."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting_server import DraftingServer
from json_files import read_json
from launching import metrics, outcome
from mtp_train import check
from mtp_train.checkpoints.suggestions import evaluate_command
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.evaluation import run as evaluation
from mtp_train.evaluation.arms import ArmSpec, load_arm_trunk, open_arm
from mtp_train.evaluation.results import Report, load_report
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import decode, pipeline, study as stages
from mtp_train.runs.study import CLAIM
from openai_server import openai_server
from repository import REPOSITORY
from runs import Capture, document, run_command, tiny_recipe

# Commands

SMALL = ["--prompts-per-task", 3, "--depths", 1, 2, "--max-new-tokens", 10]


def suite(inputs: Path) -> list[Any]:
    return ["--suite", inputs / "chats.jsonl", *SMALL]


def cells_of(report: Any, **fields: Any) -> list[Any]:
    return [cell for cell in report["cells"] if all(cell[name] == value for name, value in fields.items())]


def test_evaluate_measures_a_grid_once(
    inputs: Path, out: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", inputs / "base", *suite(inputs), "--out", out]
    report = document(command, capfd)
    assert report == read_json(out / "report.json")
    assert list(report["arms"]) == ["none", "base"]
    assert (report["arms"]["none"]["tau"], report["arms"]["none"]["head"]) == (1.0, None)
    pooled = cells_of(report, task="all", arm="base")
    assert {(one["temperature"], one["rule"], one["depth"]) for one in pooled} == {
        (0.0, "greedy", 1),
        (0.0, "greedy", 2),
        *((1.0, rule, depth) for rule in ("argmax", "sampled") for depth in (1, 2)),
    }
    for cell in pooled:
        assert cell["tau"] == pytest.approx(1 + cell["accepted_tokens"] / cell["rounds"])
        assert (cell["prompts"], cell["draft_tokens"]) == (3, cell["rounds"] * cell["depth"])
        assert len(cell["overlap"]) == cell["depth"]
    # Greedy and argmax texts equal plain decoding; sampled ones follow the rule.
    counts = {"checked": 18, "identical": 12, "near_tie_divergences": 0, "sampled": 6}
    assert 0.0 < report["lossless"]["noise"] < 1e-3
    assert report["lossless"] == {**counts, "noise": report["lossless"]["noise"], "faults": []}
    assert (out / "report.html").is_file()
    with (out / "acceptance.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(report["cells"])
    # The second time the finished study is read, and another grid refused.
    monkeypatch.setattr(evaluation, "load_arm_trunk", None)
    logged: list[Path] = []
    monkeypatch.setattr(decode, "log_report", lambda report, out, *_: logged.append(out))
    assert document(command, capfd) == report
    assert logged == [out]
    assert run_command(*command, "--seed", 7) == 2
    assert "another study (its grid differ" in capfd.readouterr().err


def test_compare_pairs_every_arm(inputs: Path, out: Path, capfd: Capture) -> None:
    finetune = inputs / "finetune"
    base = inputs / "base"
    arms = [f"vanilla={base}", f"graft={finetune}+{base}", f"lookup={finetune}+ngram"]
    report = document(["compare", *arms, *suite(inputs), "--temperatures", 0, "--out", out], capfd)
    assert list(report["arms"]) == ["none@base", "vanilla", "none@finetune", "graft", "lookup"]
    pooled = [one for one in report["comparisons"] if one["task"] == "all" and one["depth"] == 2]
    assert {frozenset((one["first"], one["second"])) for one in pooled} == {
        frozenset(pair) for pair in [("vanilla", "graft"), ("vanilla", "lookup"), ("graft", "lookup")]
    }
    assert {one["same_trunk"] for one in pooled if "vanilla" in (one["first"], one["second"])} == {False}
    assert report["arms"]["lookup"]["overlap"] is None
    assert load_report(out / "report.json").to_json() == report


@pytest.mark.parametrize("alone", [False, True])
def test_a_server_is_asked_the_same(inputs: Path, out: Path, capfd: Capture, alone: bool) -> None:
    arm = open_arm(ArmSpec("base", str(inputs / "base"), "own"))
    trunk = load_arm_trunk(arm, torch.device("cpu"))
    eos_ids = eos_token_ids(arm.checkpoint, load_tokenizer(arm.checkpoint))
    engine = DraftingServer(trunk, arm.load_drafting(trunk), 2, sorted(eos_ids), "vllm")
    with openai_server(engine.reply, owner="vllm", shows=engine.shows) as served:
        flags = ["--endpoint", served.url, "--out", str(out)]
        if alone:
            # As a run without a gate prints it, at another address.
            printed = evaluate_command(str(inputs / "base"), str(out))
            flags = shlex.split(printed.replace("http://localhost:8000/v1", served.url))[3:]
        command = ["evaluate", inputs / "base", *suite(inputs), "--temperatures", 0, *flags]
        report = document(command, capfd)
    # It is finished: the server is not asked again.
    assert document(command, capfd) == report
    assert list(report["arms"]) == (["served"] if alone else ["none", "base", "served"])
    assert report["endpoint"]["url"] == served.url
    if alone:
        assert report["endpoint"]["answers"] is None, "no weights are loaded"
    else:
        (fit,) = report["endpoint"]["answers"]
        assert (fit["temperature"], fit["found"], fit["are_the_trunks"]) == (0.0, 1.0, True)
        ours, theirs = (cells_of(report, task="all", arm=name, depth=2)[0] for name in ("base", "served"))
        assert (theirs["tau"], theirs["marginal"], theirs["rounds"]) == (ours["tau"], ours["marginal"], ours["rounds"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--depths", 9], "--depths: 9; expected 1 to 7"),
        (["--temperatures", 0, "--rules", "sampled"], "none of them for temperature 0; expected greedy"),
        (["--temperatures", -1], "--temperatures: -1"),
        (["--tasks", "nonsense"], "nonsense"),
        (["--suite", "bulitin"], "bulitin"),
        (["--served-only"], "--served-only: given without --endpoint"),
        (["--endpoint", "nowhere"], "nowhere/v1: cannot be asked"),
    ],
)
def test_wrong_input_ends_in_2_before_anything_is_decoded(
    inputs: Path, out: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, flags: list[Any], says: str
) -> None:
    monkeypatch.setattr(evaluation, "load_arm_trunk", None)
    argv = ["evaluate", inputs / "base", *suite(inputs), "--out", out, *flags]
    assert run_command(*argv) == 2
    assert says in capfd.readouterr().err
    assert not out.exists() or not list(out.iterdir())


# Recipes


STUDY: dict[str, Any] = {
    "data__regenerate": {"max_new_tokens": 12, "batch_size": 4},
    "train__max_steps": 3,
    "train__lr": "auto",
    "train__save_steps": 1,
    "evaluate__arms": ["graft", "retrained", "vanilla"],
    "evaluate__prompts": 4,
    "evaluate__max_new_tokens": 8,
    "export__enabled": False,
    "study": {"temperatures": [0.0, 1.0], "depths": [2], "batch": 4},
}
ARMS = ["none@finetune", "graft", "retrained-kl", "retrained-ce", "none@base", "vanilla"]


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a study that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    done = pipeline.run(tiny_recipe(inputs, run_dir, **STUDY))
    assert (done.exit_code, done.stage) == (0, "done")
    return run_dir


def test_a_study_leaves_what_a_run_leaves_and_its_findings(unbroken: Path) -> None:
    report = load_report(unbroken / "report.json")
    assert list(report.arms) == ARMS
    assert {cell.task for cell in report.cells if cell.arm == "graft"} == {"all"}
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
    # Heads differ by their loss alone, with one set of responses for both.
    kl, ce = (metrics(unbroken / "heads" / objective) for objective in ("kl", "ce"))
    assert [(line["step"], line["tokens"]) for line in kl] == [(line["step"], line["tokens"]) for line in ce]
    assert [line["step"] for line in kl] == [1, 2, 3]
    assert [line["lr"] for line in kl] == [line["lr"] for line in ce]
    assert kl[0]["loss"] != ce[0]["loss"]
    assert len(list((unbroken / "data").glob("responses-*"))) == 1


def stable(report: Report) -> Any:
    """Return what does not depend on the clock."""
    figures = [
        (cell.arm, cell.task, cell.temperature, cell.rule, cell.tau, cell.overlap, cell.target_entropy)
        for cell in report.cells
    ]
    return figures, report.findings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call"), [("train_stage", 2), ("Study", 1), ("write_report", 1)])
def test_a_study_killed_in_any_stage_ends_the_same(
    name: str, call: int, inputs: Path, unbroken: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(inputs, new_run, **STUDY)
    calls = iter(range(1, call))
    module = stages if name == "Study" else pipeline
    whole: Callable[..., Any] = getattr(module, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(recipe)
    pipeline.run(recipe)
    assert stable(load_report(new_run / "report.json")) == stable(load_report(unbroken / "report.json"))
    # Finished: nothing is done again.
    monkeypatch.setattr("mtp_train.runs.run.gather_inputs", lambda *_, **__: pytest.fail("run again"))
    pipeline.run(recipe)


def test_check_plans_for_all_heads(inputs: Path, tmp_path: Path) -> None:
    both = check(tiny_recipe(inputs, tmp_path, **STUDY), processes=1)
    one = check(tiny_recipe(inputs, tmp_path, **{**STUDY, "study": {"objectives": ["kl"]}}), processes=1)
    assert "frozen); a study of kl, ce\n" in str(both)
    assert both.disk_bytes == 2 * one.disk_bytes


@pytest.mark.slow
def test_the_demos_study_shows_a_stale_head_recovering(new_run: Path) -> None:
    """Smaller than the recipe, and with the same story."""
    smaller = {
        "run_dir": str(new_run),
        "data.regenerate.max_prompts": 160,
        "data.regenerate.max_new_tokens": 64,
        "train.max_steps": 20,
        "train.tokens_per_step": 1536,
        "evaluate.prompts": 12,
        "evaluate.max_new_tokens": 48,
        "study.temperatures": (0.0,),
        "study.rules": ("greedy",),
        "track.wandb": "off",
    }
    pipeline.run(load_recipe(REPOSITORY / "recipes" / "vanilla_vs_distill.yaml").replaced(smaller))
    report = load_report(new_run / "report.json")
    deltas = [one.delta_tau_ci95 for one in report.comparisons if (one.first, one.second) == ("graft", "retrained-kl")]
    assert deltas
    assert all(ci95 is not None and ci95[1] < 0 for ci95 in deltas)
    assert report.lossless is not None
    assert report.lossless.faults == ()
