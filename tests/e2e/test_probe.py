"""``probe`` on tiny models: it measures, trains briefly, goes on where it was stopped, and proposes what runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import mtp_train as mtp
from adapters import write_adapter
from mtp_train.cli.main import main
from mtp_train.runs import rescue as probing
from runs import shorten_probes, tree, write_inputs

Capture = pytest.CaptureFixture[str]
Monkey = pytest.MonkeyPatch


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: Monkey) -> Path:
    """Inputs with chats of 24 groups, from an empty directory, and a probe as short as it can be."""
    shorten_probes(monkeypatch)
    directory = write_inputs(tmp_path / "in")
    rows = [json.loads(line) for line in (directory / "chats.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["group"] = f"g{number}"
        row["messages"][0]["content"] = f"{chr(97 + number) * 9} {number} {chr(110 - number % 13) * 9}"
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return directory


def test_a_head_that_does_not_draft_for_its_own_base_is_at_fault(inputs: Path, capfd: Capture) -> None:
    words = [str(inputs / "finetune"), "--from", str(inputs / "base"), "--data", str(inputs / "chats.jsonl")]
    before = tree(inputs)
    assert main(["probe", *words, "--out", "found", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    # Random heads.
    assert (found["verdict"], found["trained_tau"]) == ("fault", None)
    assert found["base"]["tau"] < probing.LEAST_TAU
    assert not Path("found/training").exists()
    assert main(shlex.split(found["command"])[1:]) in (0, 3)
    assert tree(inputs) == before


def test_a_probe_trains_and_goes_on_where_it_was_stopped(inputs: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(probing, "LEAST_TAU", 1.0)

    def probe() -> mtp.ProbeResult:
        return mtp.probe(inputs / "finetune", inputs / "base", "found", data=[inputs / "chats.jsonl"])

    class Killed(BaseException):
        pass

    def killed(*args: object, **keywords: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(probing, "run_recipe", killed)
        with pytest.raises(Killed):
            probe()
    measured = tree(Path("found/comparison/measured"))
    first = probe()
    assert tree(Path("found/comparison/measured")) == measured
    assert first.trained_steps == 1
    assert first.trained_tau is not None
    assert first.gain_ci95 is not None
    assert first.verdict != "fault"
    assert probe() == first
    # The control: other data is not taken for the probe's.
    lines = (inputs / "chats.jsonl").read_text().splitlines()
    (inputs / "chats.jsonl").write_text("\n".join(lines[2:]) + "\n")
    with pytest.raises(mtp.MtpError, match="; expected "):
        probe()


@pytest.mark.parametrize(("verdict", "adapted"), [("graft", True), ("retrain", False)])
def test_the_proposed_command_runs(verdict: str, adapted: bool, inputs: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(probing, "LEAST_TAU", 1.0)
    monkeypatch.setattr(probing, "judge", lambda found: (verdict, "said"))
    tuned = inputs / "finetune"
    if adapted:
        tuned = inputs / "lora"
        write_adapter(inputs / "base", tuned, target_modules=["q_proj"])
    command = mtp.probe(tuned, inputs / "base", "found", data=[inputs / "chats.jsonl"]).command
    program, *words = shlex.split(command)
    assert program == "mtp-train"
    if verdict == "retrain":
        short = {"train.max_steps": 1, "data.regenerate.max_prompts": 4, "data.regenerate.max_new_tokens": 8}
        short |= {"evaluate.prompts": 8, "evaluate.max_new_tokens": 8}
        words += ["--set", *(f"{field}={value}" for field, value in short.items())]
    assert main(words) == 0
