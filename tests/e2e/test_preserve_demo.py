"""A user's fine-tuning script on the demo, with the one added line and without it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from datasets import Dataset

from mtp_train.cli import main
from mtp_train.demo import demo_path
from mtp_train.preserve import KeepHead
from preserving import trainer_arguments
from runs import document

HOW_TO = Path(__file__).parents[2] / "recipes" / "preserve.md"
Capture = pytest.CaptureFixture[str]
PROMPT = "import os\nimport sys\n\n\ndef main("


def code() -> list[str]:
    """Return documents of the kind that the base was trained on."""
    lines = demo_path("code").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:16]]


def page() -> list[str]:
    """Return the code blocks of the how-to."""
    return re.findall(r"```(?:python|bash)\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)


def fine_tune(script: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a script beside the demo; return what it saved."""
    assert main(["demo", str(directory / "demo")]) == 0
    monkeypatch.chdir(directory)
    exec(compile(script, str(HOW_TO), "exec"), {})
    return directory / "tuned"


def tau(path: Path, capfd: Capture) -> float:
    """Return the mean number of tokens that a round commits."""
    argv = ["generate", path, "--prompt", PROMPT, "--max-new-tokens", "32", "--depth", "3"]
    (request,) = document(argv, capfd)["requests"]
    return 1 + request["num_accepted_tokens"] / request["num_drafts"]


def test_the_how_to_keeps_the_head_and_it_drafts(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, commands = page()
    tuned = fine_tune(script, tmp_path, monkeypatch)
    for line in commands.splitlines():
        assert main(shlex.split(line, comments=True)[1:]) == 0
    for path in (tuned / "checkpoint-1", tuned):
        found = document(["inspect", path, "--base", "demo:base"], capfd)
        assert (found["status"], found["stale"]) == ("healthy", True)
    # Without a head a round commits one token.
    assert tau(tuned, capfd) > 2


def test_without_the_line_inspect_names_what_was_lost(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, line = page()[0], "    callbacks=[KeepHead()],  # the one line\n"
    assert line in script
    tuned = fine_tune(script.replace(line, ""), tmp_path, monkeypatch)
    found = document(["inspect", tuned, "--base", "demo:base"], capfd)
    assert found["status"] == "declared_but_missing"
    assert "mtp.fc.weight" in found["missing_keys"]
    assert found["cure"].startswith("mtp-train graft ")


@pytest.mark.parametrize("lora", [False, True])
def test_with_the_line_trl_keeps_the_head(lora: bool, tmp_path: Path, capfd: Capture) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from peft import LoraConfig

    trainer = trl.SFTTrainer(
        model=str(demo_path("base")),
        args=trl.SFTConfig(**trainer_arguments(tmp_path / "out", max_length=64, bf16=False)),
        train_dataset=Dataset.from_list([{"text": text} for text in code()]),
        peft_config=LoraConfig(target_modules=["q_proj", "up_proj"]) if lora else None,
        callbacks=[KeepHead()],
    )
    trainer.train()
    saved = tmp_path / "out" / "checkpoint-2"
    if lora:
        saved = tmp_path / "merged"
        trainer.model.merge_and_unload().save_pretrained(saved)
        trainer.processing_class.save_pretrained(saved)
    found = document(["inspect", saved, "--base", "demo:base"], capfd)
    assert (found["status"], found["stale"]) == ("healthy", True)
    assert tau(saved, capfd) > 2
