"""``probe`` and ``rescue`` on tiny models: from a stripped fine-tune, or an adapter, to the better of two heads."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mtp_train as mtp
from adapters import write_adapter
from checkpoints import all_tensors, holds
from json_files import read_json, write_rows
from left_over import head_of
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import rescue as rescue_module
from mtp_train.runs.rescue import HeadLevel, ProbeResult
from repository import RECIPES
from runs import (
    GETS_NO_BETTER,
    LEARNS,
    TINY_RESCUE,
    Capture,
    document,
    overrides_of,
    refusal,
    run_command,
    shorten_probes,
    tree,
)

HOW_TO = RECIPES / "rescue.md"
Monkey = pytest.MonkeyPatch


@pytest.fixture
def inputs(own_inputs: Path, tmp_path: Path, monkeypatch: Monkey) -> Path:
    """Inputs, from an empty directory, and probes as short as they can be."""
    shorten_probes(monkeypatch)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return own_inputs


@pytest.fixture
def varied(inputs: Path) -> Path:
    """The same with chats of 24 groups."""
    rows = [json.loads(line) for line in (inputs / "chats.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["group"] = f"g{number}"
        row["messages"][0]["content"] = f"{chr(97 + number) * 9} {number} {chr(110 - number % 13) * 9}"
    write_rows(inputs / "chats.jsonl", rows)
    return inputs


def asking(inputs: Path, tuned: Path | None = None) -> list[Any]:
    """Return a rescue as a user writes it, without settings, into ``out``."""
    pair = [tuned or inputs / "finetune", "--from", inputs / "base"]
    return ["rescue", *pair, "--data", inputs / "chats.jsonl", "--out", "out"]


def status(capfd: Capture, path: str | Path) -> Any:
    return document(["inspect", path], capfd)["status"]


def has_the_head_of(base: Path, export: Path) -> bool:
    return holds(all_tensors(export), head_of(base))


# Probes


def test_the_how_to_runs_as_it_is_written(inputs: Path, capfd: Capture) -> None:
    """On tiny models, with settings that suit them."""
    before = tree(inputs)
    names = {"my-model": "finetune", "BASE": "base", "chats.jsonl": "chats.jsonl"}
    block, probing = re.findall(r"```bash\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for line in [*block.splitlines(), *probing.splitlines()]:
        words = [str(inputs / names[word]) if word in names else word for word in shlex.split(line)[1:]]
        more = ["--set", *TINY_RESCUE, *overrides_of(**LEARNS)] if words[0] == "rescue" else []
        found.append(document([*words, *more, *(["--out", "probed"] if words[0] == "probe" else [])], capfd))
        if words[0] == "rescue":
            # Again: nothing is done twice.
            assert document([*words, *more], capfd) == found[-1]
    stripped, rescued, whole, probed = found
    assert (stripped["status"], rescued["head"], whole["status"]) == ("declared_but_missing", "retrained", "healthy")
    assert rescued["serves"]["vllm"].startswith("vllm serve rescued/export --speculative-config")
    assert not has_the_head_of(inputs / "base", Path("rescued/export"))
    # The heads of tiny models are random.
    assert (probed["verdict"], probed["trained_tau"]) == ("fault", None)
    assert probed["base"]["tau"] < rescue_module.LEAST_TAU
    assert not Path("probed/training").exists()
    assert main(shlex.split(probed["command"])[1:]) in (0, 3)
    assert tree(inputs) == before


def test_a_probe_trains_and_goes_on_where_it_was_stopped(varied: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(rescue_module, "LEAST_TAU", 1.0)

    def probe() -> mtp.ProbeResult:
        return mtp.probe(varied / "finetune", varied / "base", "found", data=[varied / "chats.jsonl"])

    def killed(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rescue_module, "run_recipe", killed)
        with pytest.raises(KeyboardInterrupt):
            probe()
    measured = tree(Path("found/comparison/measured"))
    first = probe()
    assert tree(Path("found/comparison/measured")) == measured
    assert (first.trained_steps, first.trained_tau is None, first.gain_ci95 is None) == (1, False, False)
    assert first.verdict != "fault"
    assert probe() == first
    # The control: other data is not taken for the probe's.
    lines = (varied / "chats.jsonl").read_text().splitlines()
    (varied / "chats.jsonl").write_text("\n".join(lines[2:]) + "\n")
    with pytest.raises(mtp.MtpError, match="; expected "):
        probe()


def test_a_probe_of_plain_text_trains_on_it_where_no_answers_are_asked_for(inputs: Path, monkeypatch: Monkey) -> None:
    class Reached(Exception):
        pass

    def compare(recipe: Any, *others: object) -> None:
        assert recipe.data.regenerate is None
        raise Reached

    texts = [{"text": f"{chr(97 + number) * 9} {number} {chr(122 - number) * 9}"} for number in range(16)]
    write_rows(inputs / "texts.jsonl", texts)
    given = {"data": [inputs / "texts.jsonl"]}
    with pytest.raises(mtp.MtpError, match=r"plain text has no prompt; .* Add data\.regenerate=null to train"):
        mtp.probe(inputs / "finetune", inputs / "base", "found", **given)
    monkeypatch.setattr(rescue_module, "_compare", compare)
    with pytest.raises(Reached):
        mtp.probe(inputs / "finetune", inputs / "base", "found", **given, overrides=["data.regenerate=null"])


def test_the_command_that_is_proposed_for_an_adapter_runs(varied: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(rescue_module, "LEAST_TAU", 1.0)
    monkeypatch.setattr(rescue_module, "judge", lambda found: ("graft", "said"))
    write_adapter(varied / "base", varied / "lora")
    found = mtp.probe(varied / "lora", varied / "base", "found", data=[varied / "chats.jsonl"])
    program, *words = shlex.split(found.command)
    assert program == "mtp-train"
    assert main(words) == 0


def test_a_head_that_fits_its_own_trunk_is_served_as_it_is(varied: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(rescue_module, "LEAST_TAU", 1.0)
    monkeypatch.setattr(rescue_module, "judge", lambda found: ("graft", "said"))
    found = mtp.probe(varied / "base", varied / "base", "found", data=[varied / "chats.jsonl"])
    assert found.command == f"serve {varied / 'base'} as it is"


def test_a_probe_from_before_is_not_made_again(inputs: Path, capfd: Capture) -> None:
    tuned = (inputs / "finetune").rename(inputs / "mine")
    out = inputs / "mine-rescued"

    def measured() -> dict[str, Any]:
        # The records of the inputs have the time of each reading.
        return {path: found for path, found in tree(out / "probe").items() if "inputs.json" not in path}

    document(["probe", *asking(inputs, tuned)[1:-2]], capfd)
    before = measured()
    assert before
    assert run_command(*asking(inputs, tuned)[:-1], out) == 2
    assert "nothing was trained" in capfd.readouterr().err
    assert measured() == before


# Rescues


def test_where_training_does_not_help_the_graft_is_exported_and_an_adapter_merged(inputs: Path, capfd: Capture) -> None:
    write_adapter(inputs / "base", Path("lora"))
    argv = [*asking(inputs, Path("lora")), "--set", *TINY_RESCUE, *overrides_of(**GETS_NO_BETTER)]
    rescued = document(argv, capfd)
    assert (rescued["head"], status(capfd, rescued["out"])) == ("graft", "healthy")
    assert re.search("does not lie above 0|training gave no gain", rescued["reason"])
    # What the refusal proposes is done.
    proposed = "The head as it was is not shown to be worse: mtp-train "
    assert proposed in read_json(Path("out/report.json"))["gate"]["reason"]
    assert proposed not in rescued["reason"]
    base = all_tensors(inputs / "base")
    export = all_tensors(Path(rescued["out"]))
    assert base.keys() == export.keys()
    changed = {key for key, value in base.items() if not torch.equal(export[key], value)}
    assert changed
    assert all("q_proj" in key and not key.startswith("mtp.") for key in changed)
    assert read_json(Path("out/outcome.json"))["reason"] == "gate_refused"
    # The page of the run has nothing to serve; the rescue's has.
    assert rescued["serves"]["vllm"] in html.unescape(Path("out/report.html").read_text())
    assert document(argv, capfd) == rescued


def probed(monkeypatch: Monkey, verdict: Any) -> list[Path]:
    """Let every probe find a verdict, and return where they were asked for."""
    asked: list[Path] = []

    def found(tuned: str, donor: str, out: Path, *_: Any) -> tuple[ProbeResult, None]:
        asked.append(out)
        out.mkdir(parents=True, exist_ok=True)
        level = HeadLevel(2.0, (1.9, 2.1), 0.5)
        return ProbeResult(verdict, "tau is what it is", "mtp-train inspect x", level, level, None, None), None

    monkeypatch.setattr(rescue_module, "_probed", found)
    return asked


def test_a_rescue_probes_first_and_stops_where_the_head_is_good_enough(
    inputs: Path, capfd: Capture, monkeypatch: Monkey
) -> None:
    asked = probed(monkeypatch, "graft")
    save_file({"mtp.norm.weight": torch.zeros(4)}, inputs / "finetune" / "old.safetensors")
    rescued = document(asking(inputs), capfd)
    assert asked == [Path("out/probe")]
    assert (rescued["head"], status(capfd, "out")) == ("graft", "healthy")
    assert rescued["reason"].startswith("tau is what it is. To retrain the head all the same, choose another --out")
    assert rescued["notes"] == ["Left out, as no part of the checkpoint: old.safetensors (1 tensors, 1 of a head)."]
    assert sorted(path.name for path in Path("out").iterdir()) == ["export", "probe"]
    assert has_the_head_of(inputs / "base", Path("out/export"))
    # Again: the same, and the export is not written twice.
    assert document(asking(inputs), capfd) == rescued


def test_a_rescue_trains_nothing_where_the_probe_finds_a_fault(
    inputs: Path, capfd: Capture, monkeypatch: Monkey
) -> None:
    asked = probed(monkeypatch, "fault")
    assert run_command(*asking(inputs)) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "tau is what it is; nothing was trained. Look at it with mtp-train inspect x, or train all the same" in said
    assert [path.name for path in Path("out").iterdir()] == ["probe"]
    # The cure: who sets the length has decided to train.
    rescued = document([*asking(inputs), "--set", *TINY_RESCUE], capfd)
    assert (len(asked), status(capfd, rescued["out"])) == (1, "healthy")


def test_processes_that_are_not_joined_are_refused(inputs: Path, capfd: Capture, monkeypatch: Monkey) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "launcher: started 2 processes, of which accelerate joins 1" in refusal(asking(inputs), capfd)


def test_a_rescue_sets_what_the_text_decides_once_it_exists(inputs: Path, capfd: Capture, monkeypatch: Monkey) -> None:
    asked = probed(monkeypatch, "undecided")
    short = ["data.regenerate.max_new_tokens=12", "evaluate.max_new_tokens=8", "head.num_depths=2", "track.wandb=off"]
    # Trained on all of the text.
    argv = [*asking(inputs), "--set", *short, "train.select=null"]
    rescued = document(argv, capfd)
    train = load_recipe("out/recipe.yaml").train
    rows = [json.loads(line) for file in Path("out/data").rglob("*.jsonl") for line in file.read_text().splitlines()]
    text = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows if "response_ids" in row)
    passes = train.max_steps * train.tokens_per_step / text
    # Part of the text is kept out of training, to select the best step.
    assert 9 <= passes <= 10 + train.tokens_per_step / text
    assert json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])["step"] == train.max_steps
    log = " ".join(Path("out/run.log").read_text().split())
    names = "data.holdout evaluate.prompts data.regenerate.max_prompts train.lr train.max_steps train.tokens_per_step"
    assert {name: log.count(f"{name}=") for name in names.split()} == dict.fromkeys(names.split(), 1)
    stages = ("answering", "training", "measuring")
    assert [log.count(f"stage {number} of 3, {name}") > 0 for number, name in enumerate(stages, 1)] == [True] * 3
    # The command finds the settings that the run recorded, without another probe, and nothing is done twice.
    assert document(argv, capfd) == rescued
    assert asked == [Path("out/probe")]
