"""A user's fine-tuning script on the demo, with the one added line and without it."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from mtp_train.cli.main import main
from mtp_train.recipe.loading import load_recipe
from repository import RECIPES
from runs import Capture, document

HOW_TO = RECIPES / "preserve.md"
WITH_TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl: not installed")
LINE = "    callbacks=[KeepHead()],  # the one line\n"
PROMPT = "import os\nimport sys\n\n\ndef main("


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


@pytest.mark.parametrize("library", ["transformers", pytest.param("trl", marks=WITH_TRL)])
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
