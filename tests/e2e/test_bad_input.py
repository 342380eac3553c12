"""Bad input through the command line: exit 2, one message that cures, nothing written, what was there kept whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import all_tensors, set_fields, shard
from mtp_train.checkpoints import export as export_module
from mtp_train.checkpoints.files import SINGLE_FILE
from mtp_train.cli.main import main
from runs import copy_run, tree, write_inputs, write_recipe
from tiny import ALL_FAMILIES

Capture = pytest.CaptureFixture[str]
# Where, what was found, what was expected, what to do about it.
FOUR_ANSWERS = re.compile(r"[^\n]+: [^\n]+; expected [^\n]+\. [A-Z][^\n]+[.?]")


class Damage(NamedTuple):
    """Something wrong with ``base`` or ``finetune``."""

    do: Callable[[Path], Any]
    """Given the directory that holds both."""
    message: str
    """Pattern of the message it must cause."""


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})


def lose_a_shard(inputs: Path) -> None:
    shard(inputs / "finetune")
    (inputs / "finetune" / "model-00002-of-00003.safetensors").unlink()


def poison(inputs: Path, name: str, key: str) -> None:
    """Put one NaN into a tensor of a single-file checkpoint."""
    tensors = load_file(inputs / name / SINGLE_FILE)
    tensors[key].view(-1)[-1] = float("nan")
    save(inputs / name, tensors)


def narrow_the_base(inputs: Path) -> None:
    tensors = all_tensors(inputs / "base")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]
    shutil.copytree(inputs / "base", inputs / "narrow", ignore=shutil.ignore_patterns("model*"))
    save_file(tensors, inputs / "narrow" / SINGLE_FILE, {"format": "pt"})
    shutil.rmtree(inputs / "base")
    (inputs / "narrow").rename(inputs / "base")


DAMAGES = {
    "missing shard": Damage(
        lose_a_shard,
        r"finetune/model-00002-of-00003\.safetensors: no such file; expected a shard of the checkpoint\. Download it "
        r"again\.",
    ),
    "NaN in the trunk": Damage(
        lambda inputs: poison(inputs, "finetune", "model.norm.weight"),
        r"finetune: model\.norm\.weight holds NaN or infinite values \(1 such tensors\); expected finite weights\. "
        r"Use a checkpoint saved before training diverged\.",
    ),
    "NaN in the head": Damage(
        lambda inputs: poison(inputs, "base", "mtp.norm.weight"),
        r"mtp\.norm\.weight.* holds NaN or infinite values.*; expected finite weights\. Use a checkpoint saved before",
    ),
    "base of another trunk": Damage(
        narrow_the_base,
        r"base: trunk tensor layers\.0\.mlp\.up_proj\.weight is \[47, 32\], in .*finetune it is \[48, 32\]; "
        r"expected the same trunk shape\. Point at the base that the fine-tune came from\.",
    ),
}


@pytest.fixture
def inputs(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "in"))


@pytest.fixture
def finished(recipe: Path) -> Path:
    """The directory with ``recipe.yaml`` and ``run`` of a recipe that passes the gate."""
    return recipe.parent


FIRST_LINE = "1 process on cpu, no shards\n"


def refusal(argv: list[Any], capfd: Capture) -> str:
    """Run a command that must refuse; return its message, all that it prints but for the first line of a run."""
    capfd.readouterr()
    assert main([str(word) for word in argv]) == 2
    printed = capfd.readouterr()
    assert printed.out in ("", FIRST_LINE)
    assert printed.err.startswith("mtp-train: ")
    assert printed.err.endswith("\n")
    return printed.err.removeprefix("mtp-train: ")[:-1]


def assert_recorded(run_dir: Path, message: str, stage: str) -> None:
    """The outcome of a refused run says what the command line said, and is all the run left."""
    assert [path.name for path in run_dir.iterdir()] == ["outcome.json"]
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert outcome == {"exit_code": 2, "reason": "bad_input", "message": message, "stage": stage}


# Damaged checkpoints


READING_BOTH = ("run", "graft", "generate")
OPENING = (*READING_BOTH, "inspect", "export", "evaluate", "check")
CASES = [
    *((name, command) for name in DAMAGES for command in READING_BOTH),
    *(("config", command) for command in OPENING),
    *(("failing template", command) for command in ("run", "evaluate", "chat")),
]
DAMAGES |= {
    "config": Damage(
        lambda inputs: set_fields(inputs / "finetune", {"num_hidden_layers": 10**9}),
        "num_hidden_layers is 1000000000; expected int . None up to 1000",
    ),
    "failing template": Damage(
        lambda inputs: (inputs / "finetune" / "chat_template.jinja").write_text("{{ 1 / 0 }}"),
        "fails on it .ZeroDivisionError",
    ),
}


@pytest.mark.parametrize(("name", "command"), CASES)
def test_a_damaged_checkpoint_is_refused_by_every_command_that_needs_it(
    name: str, command: str, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    damage = DAMAGES[name]
    damage.do(inputs)
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run")
    finetune, base, out = inputs / "finetune", inputs / "base", ["--out", tmp_path / "out"]
    argv = {
        "run": ["run", recipe],
        "check": ["check", recipe],
        "inspect": ["inspect", finetune],
        "graft": ["graft", finetune, "--from", base, *out],
        "export": ["export", finetune, *out],
        "generate": ["generate", finetune, "--head", base, "--prompt", "say 1"],
        "chat": ["generate", finetune, "--depth", "0", "--prompt", "say 1", "--chat"],
        "evaluate": ["evaluate", finetune, "--head", base, "--suite", inputs / "chats.jsonl", *out],
    }[command]
    before = tree(tmp_path)
    message = refusal(argv, capfd)
    assert re.search(damage.message, message)
    assert FOUR_ANSWERS.fullmatch(message)
    if command == "run":
        assert_recorded(tmp_path / "run", message, stage="check")
        shutil.rmtree(tmp_path / "run")
    assert tree(tmp_path) == before


# Recipes and data


def refused_recipe(inputs: Path, tmp_path: Path, capfd: Capture, **overrides: Any) -> str:
    """Run a recipe that must be refused before anything but the outcome is written; return the message."""
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **overrides)
    before = tree(tmp_path)
    message = refusal(["run", recipe], capfd)
    if (tmp_path / "run").exists():
        assert_recorded(tmp_path / "run", message, stage="check")
        shutil.rmtree(tmp_path / "run")
    assert tree(tmp_path) == before
    return message


def test_held_out_texts_too_short_to_continue_are_refused(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    with (inputs / "chats.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": chr(97 + number), "group": f"g{number}"}) + "\n" for number in range(8))
        file.writelines(json.dumps({"text": "long enough to learn", "group": "train"}) + "\n" for _ in range(8))
    message = refused_recipe(inputs, tmp_path, capfd)
    assert re.match(r"data\.holdout: 0\.4 holds out \d+ texts, none of them long enough to continue; expected", message)
    assert FOUR_ANSWERS.fullmatch(message)


# Targets and run directories that are taken


@pytest.mark.parametrize("command", ["graft", "merge", "export", "demo"])
def test_an_existing_target_is_refused_and_kept(
    command: str, finished: Path, pristine: Path, tmp_path: Path, capfd: Capture
) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    argv = {
        "graft": ["graft", pristine / "finetune", "--from", pristine / "base", "--out", out],
        "merge": ["merge", pristine / "base", "--adapter", tmp_path / "lora", "--out", out],
        "export": ["export", finished / "run", "--out", out],
        "demo": ["demo", out],
    }[command]
    before, links = tree(tmp_path), out.is_symlink()
    message = refusal(argv, capfd)
    what = "the demo" if command == "demo" else "the checkpoint"
    assert message.startswith(f"{out}: already exists; expected a new path for {what}. Choose another")
    assert (tree(tmp_path), out.is_symlink()) == (before, links)


# A disk that fills up


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk fill up in the middle of a checkpoint's head."""
    write = export_module.write_safetensors

    def until_full(path: Path, tensors: Any) -> None:
        write(path, tensors)
        os.truncate(path, path.stat().st_size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export_module, "write_safetensors", until_full)


def test_a_run_that_met_a_full_disk_goes_on_to_its_export(
    finished: Path, inputs: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = copy_run(finished / "run", tmp_path / "run", "export")
    command = ["run", str(finished / "recipe.yaml"), f"run_dir={run_dir}"]
    whole = tree(run_dir / "head")
    with monkeypatch.context() as full:
        fill_the_disk(full)
        capfd.readouterr()
        assert main(command) == 2
        message = capfd.readouterr().err
    assert "writing the checkpoint failed (No space left on device)" in message
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["reason"], outcome["stage"]) == (2, "bad_input", "export")
    assert outcome["message"] in message
    assert not list(run_dir.glob("*export*"))
    assert not list(run_dir.glob(".*"))
    assert tree(run_dir / "head") == whole
    assert main(command) == 0
    again, whole = tree(run_dir / "export"), tree(finished / "run" / "export")
    # The model card names speeds, which no two runs share.
    assert again.pop("README.md") is not None
    assert whole.pop("README.md") is not None
    assert again == whole


# Model cards


def test_a_card_that_cannot_be_read_does_not_stop_the_copy(inputs: Path, tmp_path: Path) -> None:
    card = b"---\n[1, 2]\n---\n# Caf\xe9\n"
    (inputs / "finetune" / "README.md").write_bytes(card)
    argv = ["graft", str(inputs / "finetune"), "--from", str(inputs / "base"), "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "## Serve it" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert (inputs / "finetune" / "README.md").read_bytes() == card


def test_a_copy_whose_card_cannot_be_written_is_removed(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mtp_train.runs.export.write_text", fail)
    before = tree(tmp_path)
    argv = ["graft", str(inputs / "finetune"), "--from", str(inputs / "base"), "--out", str(tmp_path / "out")]
    with pytest.raises(RuntimeError, match="a bug"):
        main(argv)
    assert tree(tmp_path) == before


@pytest.mark.skipif("step3p7" not in ALL_FAMILIES, reason="this transformers has no Step-3.7")
def test_a_chain_of_modules_is_not_trained_as_one(tmp_path: Path, capfd: Capture) -> None:
    inputs = write_inputs(tmp_path / "in", "step3p7")
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", objective__unroll="fastmtp")
    message = refusal(["check", recipe], capfd)
    assert message.startswith("objective.unroll: 'fastmtp' with a head of 3 chained modules")
    assert FOUR_ANSWERS.fullmatch(message)


def test_check_and_run_report_the_same_problems_at_once(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    wrong = {"head__draft_vocab": 100_000, "data__responses": str(tmp_path / "no run"), "data__regenerate": {}}
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", **wrong)
    said = []
    for command in ("check", "run"):
        assert main([command, str(recipe)]) == 2
        said.append(capfd.readouterr().err.splitlines()[-2:])
    assert said[0] == said[1]
    assert "head.draft_vocab: 100000; expected fewer" in said[0][0]
    assert said[0][1].startswith("data.responses: ")


# What is no bad input


def test_a_bug_keeps_its_traceback_and_is_recorded_as_one(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run")

    def buggy(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    with monkeypatch.context() as patched:
        patched.setattr("mtp_train.runs.pipeline.train_stage", buggy)
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            main(["run", str(recipe)])
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    message = "ZeroDivisionError: division by zero"
    assert outcome == {"exit_code": 1, "reason": "bug", "message": message, "stage": "train"}
    # Once it is mended the run goes on.
    assert main(["run", str(recipe)]) in (0, 3)
