"""A user's fine-tuning script on the demo, with the one added line and without it."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from datasets import Dataset

from mtp_train import KeepHead, demo_path
from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from preserving import trainer_arguments
from runs import document

HOW_TO = Path(__file__).parents[2] / "recipes" / "preserve.md"
Capture = pytest.CaptureFixture[str]
with_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl: not installed")
LINE = "    callbacks=[KeepHead()],  # the one line\n"
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
    script, commands, *_ = page()
    tuned = fine_tune(script, tmp_path, monkeypatch)
    for line in commands.splitlines():
        assert main(shlex.split(line, comments=True)[1:]) == 0
    for path in (tuned / "checkpoint-1", tuned):
        found = document(["inspect", path, "--base", "demo:base"], capfd)
        assert (found["status"], found["stale"]) == ("healthy", True)
    # Without a head a round commits one token.
    assert tau(tuned, capfd) > 2


@pytest.mark.parametrize("library", ["transformers", pytest.param("trl", marks=with_trl)])
def test_the_how_to_trains_the_head_beside_the_model(
    library: str, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, _, for_trl, _ = page()
    assert "trainer.train()\n" in script
    beside = "from mtp_train import train_head_beside\ntrain_head_beside(trainer)\ntrainer.train()\n"
    script = script.replace(LINE, "").replace("trainer.train()\n", beside) if library == "transformers" else for_trl
    tuned = fine_tune(script, tmp_path, monkeypatch)
    found = document(["inspect", tuned, "--base", "demo:base"], capfd)
    assert (found["status"], found["stale"]) == ("healthy", False)
    assert tau(tuned, capfd) > 2


def test_the_study_that_the_how_to_names_takes_the_fine_tune() -> None:
    _, command, name, *overrides = shlex.split(page()[-1].replace("\\\n", ""))
    assert command == "run"
    recipe = load_recipe(HOW_TO.with_name(f"{name}.yaml"), overrides)
    assert recipe.study is not None
    assert (recipe.model.trunk, recipe.model.head_from) == ("tuned", "demo/base")


@with_trl
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_with_one_line_trl_keeps_the_head(kind: str, tmp_path: Path, capfd: Capture) -> None:
    import trl
    from peft import LoraConfig

    trainer = trl.SFTTrainer(
        model=str(demo_path("base")),
        args=trl.SFTConfig(**trainer_arguments(tmp_path / "out", max_length=64, bf16=False, learning_rate=1e-5)),
        train_dataset=Dataset.from_list([{"text": text} for text in code()]),
        peft_config=LoraConfig(target_modules=["q_proj", "up_proj"]) if kind == "lora" else None,
        callbacks=[KeepHead()],
    )
    trainer.train()
    saved = tmp_path / "out" / "checkpoint-2"
    if kind == "lora":
        saved = tmp_path / "merged"
        trainer.model.merge_and_unload().save_pretrained(saved)
        trainer.processing_class.save_pretrained(saved)
    found = document(["inspect", saved, "--base", "demo:base"], capfd)
    assert (found["status"], found["stale"]) == ("healthy", True)
    assert tau(saved, capfd) > 2
