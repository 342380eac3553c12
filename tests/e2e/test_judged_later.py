"""A run without a gate is judged by the evaluations of its baseline's server and its export's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from json_files import read_json, write_rows
from llama_server import GROUPS, llama, serving
from mtp_train.runs import pipeline
from openai_server import ReplyFn
from runs import Capture, run_command, tiny_recipe

Judge = Callable[..., int]
UNGATED: dict[str, Any] = {"gate__enabled": False, "evaluate__prompts": 1, "train__max_steps": 1}


@pytest.fixture(scope="module")
def unjudged(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory, which tests copy."""
    path = tmp_path_factory.mktemp("unjudged") / "run"
    pipeline.run(tiny_recipe(pristine, path, **UNGATED))
    return path


@pytest.fixture
def run_dir(unjudged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unjudged, tmp_path / "run"))


@pytest.fixture
def judge(run_dir: Path, pristine: Path, tmp_path: Path) -> Judge:
    """Return a function that measures two servers one after the other, and judges the run by them."""
    new = write_rows(tmp_path / "new.jsonl", [{"prompt": f"new {number}"} for number in range(GROUPS)])

    def run(
        stale: ReplyFn,
        retrained: ReplyFn,
        *,
        served: Path = run_dir / "export",
        suite: Path = new,
        more: tuple[str, ...] = ("--judges", str(run_dir)),
        out: str = "judged",
    ) -> int:
        grid = ["--suite", str(suite), "--temperatures", "0", "--prompts-per-task", str(GROUPS)]
        arms = []
        for name, checkpoint, reply in (("stale", pristine / "finetune", stale), ("retrained", served, retrained)):
            arms.append(f"{name}={tmp_path / name}")
            if (tmp_path / name).exists():
                continue
            with serving(reply) as server:
                asked = ["--endpoint", server.url, "--served-only", *grid, "--out", str(tmp_path / name)]
                assert run_command("evaluate", checkpoint, *asked) == 0
        return run_command("compare", *arms, *grid, *more, "--out", tmp_path / out)

    return run


def read(path: Path) -> Any:
    return read_json(path)


def test_a_better_head_is_done_and_stays_done(judge: Judge, run_dir: Path, tmp_path: Path) -> None:
    for _ in range(2):
        # The second time the evaluations are at hand, and say the same.
        assert judge(llama(0), llama(2)) == 0
        outcome = read(run_dir / "outcome.json")
        report = read(run_dir / "report.json")
        assert (outcome["exit_code"], outcome["reason"], outcome["stage"]) == (0, "done", "done")
        assert outcome["message"].endswith(f"Exported to {run_dir / 'export'}.")
        assert (report["gate"]["outcome"], report["gate"]["baseline"]) == ("passed", "stale")
        assert report["gate"] == read(tmp_path / "judged" / "report.json")["gate"]
    card = (run_dir / "export" / "README.md").read_text()
    assert "## Acceptance: passed" in card
    page = (run_dir / "report.html").read_text()
    for text in (card, page):
        assert "Unjudged" not in text
        assert "(stale) on 8 prompts of 8 groups" in text
    assert "The retrained head beats stale" in page


def test_a_run_is_judged_once(judge: Judge, run_dir: Path, tmp_path: Path, capfd: Capture) -> None:
    assert judge(llama(0), llama(2)) == 0
    before = (run_dir / "outcome.json").read_bytes()
    assert judge(llama(0), llama(2), out="again") == 2
    assert "it was judged before; expected an unjudged run" in capfd.readouterr().err
    assert (run_dir / "outcome.json").read_bytes() == before


def test_a_refused_export_stays_and_says_so(judge: Judge, run_dir: Path, tmp_path: Path, capfd: Capture) -> None:
    files = {path.name for path in (run_dir / "export").iterdir()}
    assert judge(llama(2), llama(0)) == 3
    outcome = read(run_dir / "outcome.json")
    assert (outcome["exit_code"], outcome["reason"], outcome["stage"]) == (3, "gate_refused", "done")
    printed = capfd.readouterr().out
    card = (run_dir / "export" / "README.md").read_text()
    for text in (outcome["message"], " ".join(printed.split()), card):
        assert "mtp-train graft" in text.replace("│ ", "")
    assert f"The export was written before, and stays: {run_dir / 'export'}" in outcome["message"]
    assert {path.name for path in (run_dir / "export").iterdir()} == files
    assert "## Acceptance: refused" in card
    assert "Refused: no gain shown over stale" in (run_dir / "report.html").read_text()
    assert run_command("export", run_dir, "--out", tmp_path / "more") == 3


def test_drafts_that_may_not_pay_are_undecided(
    pristine: Path, judge: Judge, run_dir: Path, tmp_path: Path, capfd: Capture
) -> None:
    shutil.rmtree(run_dir)
    pipeline.run(tiny_recipe(pristine, run_dir, **UNGATED, gate__baseline="none"))
    assert judge(llama(-1), llama(2)) == 3
    assert read(run_dir / "outcome.json")["reason"] == "gate_undecided"
    page = (run_dir / "report.html").read_text()
    assert "Undecided whether drafts pay" in page
    assert "nothing is exported" not in page


@pytest.mark.parametrize(
    ("stale", "changed", "told"),
    [
        (
            llama(0),
            lambda inputs: {"served": inputs / "finetune"},
            "retrained: inputs changed since it was begun: the served checkpoint",
        ),
        (llama(-1), lambda inputs: {}, "the baseline decoded as none; expected"),
        (
            llama(0),
            lambda inputs: {"suite": inputs / "chats.jsonl"},
            "the prompts are not new (No: arm run was trained",
        ),
        (llama(0), lambda inputs: {"more": ("--judges", str(inputs))}, "not a run with an export"),
    ],
)
def test_another_comparison_records_no_verdict(
    judge: Judge,
    run_dir: Path,
    pristine: Path,
    capfd: Capture,
    stale: ReplyFn,
    changed: Callable[[Path], dict[str, Any]],
    told: str,
) -> None:
    before = {path: path.read_bytes() for path in run_dir.glob("*.json")}
    assert judge(stale, llama(2), **changed(pristine)) == 2
    assert told in capfd.readouterr().err
    assert {path: path.read_bytes() for path in run_dir.glob("*.json")} == before


@pytest.mark.parametrize(
    ("gate", "stale", "code", "told"),
    [
        ({"gate__confidence": 0.999}, llama(0), 3, "0.999 confidence needs prompts of at least 10 groups"),
        ({"gate__baseline": "none", "gate__break_even_tau": 2.0}, llama(-1), 0, "gate.break_even_tau 2.00; here: "),
    ],
)
def test_the_run_s_own_gate_decides(
    pristine: Path,
    judge: Judge,
    run_dir: Path,
    tmp_path: Path,
    gate: dict[str, Any],
    stale: ReplyFn,
    code: int,
    told: str,
) -> None:
    """At 95 % and by the measured speed, the outcomes would be the opposite."""
    shutil.rmtree(run_dir)
    pipeline.run(tiny_recipe(pristine, run_dir, **UNGATED, **gate))
    assert judge(stale, llama(2)) == code
    for found in (run_dir, tmp_path / "judged"):
        assert told in read(found / "report.json")["gate"]["reason"]
    # The same servers by another rule are another comparison.
    assert judge(stale, llama(2), more=()) == 2
