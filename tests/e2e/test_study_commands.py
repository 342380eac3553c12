"""``evaluate`` and ``compare`` from the command line, on tiny models and a file of prompts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting_server import DraftingServer
from mtp_train.cli.main import main
from mtp_train.evaluation import run
from mtp_train.evaluation.arms import ArmSpec, load_arm_trunk, open_arm
from mtp_train.evaluation.results import load_report
from mtp_train.runs import decode
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer
from openai_server import openai_server, served_by
from runs import document

SMALL = ["--prompts-per-task", 3, "--depths", 1, 2, "--max-new-tokens", 10]


def suite(inputs: Path) -> list[Any]:
    return ["--suite", inputs / "chats.jsonl", *SMALL]


def cells_of(report: Any, **fields: Any) -> list[Any]:
    return [cell for cell in report["cells"] if all(cell[name] == value for name, value in fields.items())]


def test_evaluate_measures_a_grid(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    report = document(["evaluate", inputs / "base", *suite(inputs), "--out", out], capfd)
    assert report == json.loads((out / "report.json").read_text(encoding="utf-8"))
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
        assert sum(cell["accepted_histogram"]) == cell["rounds"]
        assert len(cell["overlap"]) == cell["depth"]
    # Greedy and argmax texts equal plain decoding; sampled ones need not.
    assert report["lossless"] == {"checked": 12, "identical": 12, "near_tie_divergences": 0, "noise": None}
    assert (out / "report.html").is_file()
    with (out / "acceptance.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(report["cells"])


def test_a_finished_study_is_read_and_another_grid_refused(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["evaluate", inputs / "base", *suite(inputs), "--temperatures", 0, "--out", out]
    report = document(command, capfd)
    monkeypatch.setattr(run, "load_arm_trunk", None)
    logged: list[Path] = []
    monkeypatch.setattr(decode, "log_report", lambda report, out, *_: logged.append(out))
    assert document(command, capfd) == report
    assert logged == [out]
    assert main([str(one) for one in [*command, "--seed", 7]]) == 2
    assert "another study (its grid differ" in capfd.readouterr().err


def test_compare_pairs_every_arm(inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune, base = inputs / "finetune", inputs / "base"
    arms = [f"vanilla={base}", f"graft={finetune}+{base}", f"lookup={finetune}+ngram", f"small={finetune}+model:{base}"]
    out = tmp_path / "out"
    report = document(["compare", *arms, *suite(inputs), "--temperatures", 0, "--out", out], capfd)
    assert list(report["arms"]) == ["none@base", "vanilla", "none@finetune", "graft", "lookup", "small"]
    pooled = [one for one in report["comparisons"] if one["task"] == "all" and one["depth"] == 2]
    assert {frozenset((one["first"], one["second"])) for one in pooled} == {
        frozenset(pair)
        for pair in [
            ("vanilla", "graft"), ("vanilla", "lookup"), ("vanilla", "small"),
            ("graft", "lookup"), ("graft", "small"), ("lookup", "small"),
        ]
    }  # fmt: skip
    assert {one["same_trunk"] for one in pooled if "vanilla" in (one["first"], one["second"])} == {False}
    assert report["arms"]["lookup"]["overlap"] is None
    assert load_report(out / "report.json").to_json() == report


@pytest.mark.parametrize("alone", [False, True])
def test_a_server_is_asked_the_same(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], alone: bool
) -> None:
    arm = open_arm(ArmSpec("base", str(inputs / "base"), "own"))
    trunk = load_arm_trunk(arm, torch.device("cpu"))
    eos_ids = eos_token_ids(arm.checkpoint, load_tokenizer(arm.checkpoint, trust_remote_code=False))
    engine = DraftingServer(trunk, arm.load_drafting(trunk), 2, sorted(eos_ids), "vllm")
    with openai_server(engine.reply, owner="vllm", shows=engine.shows) as served:
        flags = ["--endpoint", served.url, "--temperatures", 0, *(["--served-only"] if alone else [])]
        command = ["evaluate", inputs / "base", *suite(inputs), *flags, "--out", tmp_path / "out"]
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


def test_answers_that_are_not_the_trunks_are_told(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = load_arm_trunk(open_arm(ArmSpec("other", str(inputs / "base"), None)), torch.device("cpu"))
    with torch.no_grad():
        other.causal_lm.get_output_embeddings().weight.copy_(other.lm_head_VD.flip(0))
    with openai_server(served_by(other, [])) as served:
        argv = ["evaluate", inputs / "base", *suite(inputs), "--endpoint", served.url, "--out", tmp_path / "out"]
        endpoint = document(argv, capfd)["endpoint"]
    assert [(fit["temperature"], fit["are_the_trunks"]) for fit in endpoint["answers"]] == [(0.0, False), (1.0, None)]
    for told in ("temperature 0 are not the trunk's: over 3", "30 tokens at temperature 1 are too few to tell"):
        assert [warning for warning in endpoint["warnings"] if told in warning]


def test_a_server_that_is_not_there_is_found_before_anything_is_decoded(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_arm_trunk", None)
    argv = ["evaluate", inputs / "base", *suite(inputs), "--endpoint", "nowhere", "--out", tmp_path / "out"]
    assert main([str(one) for one in argv]) == 2
    assert "--endpoint: 'nowhere'; expected an address" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--depths", 9], "--depths: 9; expected 1 to 7"),
        (["--temperatures", 0, "--rules", "sampled"], "none of them for temperature 0; expected greedy"),
        (["--temperatures", -1], "--temperatures: -1"),
        (["--tasks", "nonsense"], "nonsense"),
        (["--suite", "bulitin"], "bulitin"),
        (["--served-only"], "--served-only: given without --endpoint"),
    ],
)
def test_wrong_input_ends_in_2_and_leaves_nothing(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[Any], says: str
) -> None:
    out = tmp_path / "out"
    argv = ["evaluate", inputs / "base", *suite(inputs), "--out", out, *flags]
    assert main([str(one) for one in argv]) == 2
    assert says in capfd.readouterr().err
    assert not out.exists() or not list(out.iterdir())
