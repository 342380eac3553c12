"""A rescue: one command from a stripped fine-tune, or an adapter, to the better of two heads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapters import write_adapter
from checkpoints import all_tensors
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import rescue as rescue_module
from mtp_train.runs.rescue import HeadLevel, ProbeResult
from mtp_train.runs.resolve import resolved_recipe
from mtp_train.runs.write_recipe import settings_of
from runs import GETS_NO_BETTER, LEARNS, TINY_RESCUE, document, overrides_of, shorten_probes, tree

Capture = pytest.CaptureFixture[str]


def command(inputs: Path, out: Path, finetune: Path, **overrides: Any) -> list[Any]:
    return [*asking(inputs, out, finetune), "--set", *TINY_RESCUE, *overrides_of(**overrides)]


def asking(inputs: Path, out: Path, finetune: Path) -> list[Any]:
    """Return the command as a user writes it, without settings."""
    return ["rescue", finetune, "--from", inputs / "base", "--out", out, "--data", inputs / "chats.jsonl"]


def status(capfd: Capture, path: str) -> Any:
    return document(["inspect", path], capfd)["status"]


def test_a_head_that_learnt_is_exported(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    argv = command(inputs, tmp_path / "out", inputs / "finetune", **LEARNS)
    rescued = document(argv, capfd)
    assert (rescued["head"], status(capfd, rescued["out"])) == ("retrained", "healthy")
    assert rescued["serves"]["vllm"].startswith(f"vllm serve {rescued['out']} --speculative-config")
    base, export = all_tensors(inputs / "base"), all_tensors(Path(rescued["out"]))
    assert any(not torch.equal(export[key], value) for key, value in base.items() if key.startswith("mtp."))
    # Again: nothing is done twice.
    assert document(argv, capfd) == rescued


def test_where_training_does_not_help_the_graft_is_exported(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    argv = command(inputs, tmp_path / "out", inputs / "finetune", **GETS_NO_BETTER)
    rescued = document(argv, capfd)
    assert (rescued["head"], status(capfd, rescued["out"])) == ("graft", "healthy")
    assert re.search("does not lie above 0|training gave no gain", rescued["reason"])
    # What the refusal proposes is done.
    assert "mtp-train graft" in json.loads((tmp_path / "out" / "report.json").read_text())["gate"]["reason"]
    assert "mtp-train graft" not in rescued["reason"]
    base, export = all_tensors(inputs / "base"), all_tensors(Path(rescued["out"]))
    assert all(torch.equal(export[key], value) for key, value in base.items() if key.startswith("mtp."))
    assert json.loads((tmp_path / "out" / "outcome.json").read_text())["reason"] == "gate_refused"
    assert document(argv, capfd) == rescued


def test_an_adapter_is_merged(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    write_adapter(inputs / "base", tmp_path / "lora", target_modules=["q_proj"])
    rescued = document(command(inputs, tmp_path / "out", tmp_path / "lora", **GETS_NO_BETTER), capfd)
    assert status(capfd, rescued["out"]) == "healthy"
    base, export = all_tensors(inputs / "base"), all_tensors(Path(rescued["out"]))
    assert base.keys() == export.keys()
    changed = {key for key, value in base.items() if not torch.equal(export[key], value)}
    assert changed
    assert all("q_proj" in key for key in changed)


def probed(monkeypatch: pytest.MonkeyPatch, verdict: Any) -> list[Path]:
    """Let every probe find a verdict, and return where they were asked for."""
    asked: list[Path] = []

    def found(tuned: str, donor: str, out: Path, *_: Any) -> ProbeResult:
        asked.append(out)
        out.mkdir(parents=True, exist_ok=True)
        level = HeadLevel(2.0, (1.9, 2.1), 0.5)
        return ProbeResult(verdict, "tau is what it is", "mtp-train inspect x", level, level, None, None)

    monkeypatch.setattr(rescue_module, "probe_with", found)
    return asked


def test_a_rescue_probes_first_and_stops_where_the_head_is_good_enough(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = probed(monkeypatch, "graft")
    out = tmp_path / "out"
    argv = asking(inputs, out, inputs / "finetune")
    rescued = document(argv, capfd)
    assert asked == [out / "probe"]
    assert (rescued["head"], status(capfd, str(out))) == ("graft", "healthy")
    assert rescued["reason"].startswith("tau is what it is. To retrain the head all the same, choose another --out")
    assert sorted(path.name for path in out.iterdir()) == ["export", "probe"]
    base, export = all_tensors(inputs / "base"), all_tensors(out / "export")
    assert all(torch.equal(export[key], value) for key, value in base.items() if key.startswith("mtp."))
    # Again: the same, and the export is not written twice.
    assert document(argv, capfd) == rescued


def test_a_rescue_names_the_weight_files_that_it_leaves_out(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed(monkeypatch, "graft")
    tuned = shutil.copytree(inputs / "finetune", tmp_path / "tuned")
    save_file({"mtp.norm.weight": torch.zeros(4)}, tuned / "old.safetensors")
    rescued = document(asking(inputs, tmp_path / "out", tuned), capfd)
    assert rescued["notes"] == ["Left out, as no part of the checkpoint: old.safetensors (1 tensors, 1 of a head)."]


def test_a_rescue_trains_nothing_where_the_probe_finds_a_fault(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = probed(monkeypatch, "fault")
    out = tmp_path / "out"
    argv = asking(inputs, out, inputs / "finetune")
    assert main([str(word) for word in argv]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "tau is what it is; nothing was trained. Look at it with mtp-train inspect x, or train all the same" in said
    assert [path.name for path in out.iterdir()] == ["probe"]
    # The cure: who sets the length has decided to train.
    rescued = document([*argv, "--set", *TINY_RESCUE], capfd)
    assert (len(asked), status(capfd, rescued["out"])) == (1, "healthy")


def test_a_probe_from_before_is_not_made_again(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_probes(monkeypatch)
    tuned, out = tmp_path / "mine", tmp_path / "out"
    shutil.copytree(inputs / "finetune", tuned)

    def measured() -> dict[str, Any]:
        # The records of the inputs have the time of each reading.
        return {path: found for path, found in tree(tmp_path / "mine-probe").items() if "inputs.json" not in path}

    said = [str(tuned), "--from", str(inputs / "base"), "--data", str(inputs / "chats.jsonl")]
    assert main(["probe", *said]) == 0
    before = measured()
    assert before
    assert main(["rescue", *said, "--out", str(out)]) == 2
    assert "nothing was trained" in capfd.readouterr().err
    assert not out.exists()
    assert measured() == before
    # The control: with another setting it is another probe, and the first one stays as it is.
    assert main(["rescue", *said, "--out", str(out), "--set", "head.num_depths=2"]) == 2
    assert json.loads((out / "probe" / "comparison" / "study.json").read_text())["grid"]["depths"] == [2]
    assert measured() == before


def test_several_processes_are_refused(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([str(word) for word in command(inputs, tmp_path / "out", inputs / "finetune")]) == 2
    assert "mtp-train rescue: launched with 2 processes; expected one" in " ".join(capfd.readouterr().err.split())


def test_a_rescue_sets_what_the_text_decides_once_it_exists(
    inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = probed(monkeypatch, "undecided")
    short = ["data.regenerate.max_new_tokens=12", "evaluate.max_new_tokens=8", "head.num_depths=2", "track.wandb=off"]
    # Trained on all of the text.
    short.append("train.select=null")
    out = tmp_path / "out"
    argv = asking(inputs, out, inputs / "finetune")
    rescued = document([*argv, "--set", *short], capfd)
    recipe = load_recipe(out / "recipe.yaml")
    text = stored_text(out)
    passes = recipe.train.max_steps * recipe.train.tokens_per_step / text
    # Part of the text is kept out of training, to select the best step.
    assert 9 <= passes <= 10 + recipe.train.tokens_per_step / text
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == recipe.train.max_steps
    # The command finds the settings that the run recorded, without another probe, and nothing is done twice.
    assert document([*argv, "--set", *short], capfd) == rescued
    assert asked == [out / "probe"]


def stored_text(run_dir: Path) -> int:
    """Count the tokens of prompts and responses in a run directory."""
    files = list((run_dir / "data").rglob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows if "response_ids" in row)


def test_a_rescue_without_prompts_takes_built_in_ones_or_the_demos(inputs: Path, tmp_path: Path) -> None:
    pair = str(inputs / "finetune"), str(inputs / "base")
    recipe, choices = resolved_recipe(settings_of("graft", *pair, str(tmp_path), []))
    assert recipe.data.sources[0].path.endswith("builtin.jsonl")
    ours, same = resolved_recipe(settings_of("graft", "demo:finetune", "demo:base", str(tmp_path), []))
    assert ours.data.sources[0].path == "demo:prompts"
    # The demo has no settings of its own.
    assert [choice.field for choice in same] == [choice.field for choice in choices]
    assert ours.evaluate.replaced({"prompts": 1}) == recipe.evaluate.replaced({"prompts": 1})
