"""No command writes to its inputs, whatever weight files lie in their directories, also through a link."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from adapters import write_adapter
from checkpoints import all_tensors, holds
from left_over import LAYOUTS, head_of, into_hub_cache
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from runs import LEARNS, TINY_RESCUE, run_command, shorten_probes, tiny_mapping, write_inputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("saved"))
    write_adapter(directory / "base", directory / "lora")
    return directory


@pytest.fixture(params=[*LAYOUTS, "hub_cache"])
def inputs(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Path:
    """Base and fine-tune in one of the layouts, beside the data."""
    return laid_out(saved, tmp_path / "in", request.param)


def laid_out(saved: Path, directory: Path, layout: str) -> Path:
    shutil.copytree(saved, directory)
    head = head_of(saved / "base")
    for name in ("base", "finetune"):
        path = LAYOUTS["head_outside_of_the_index" if layout == "hub_cache" else layout](directory / name, head)
        if layout == "hub_cache":
            snapshot = into_hub_cache(path, directory / "cache" / name, revision=f"{name}abc")
            shutil.rmtree(path)
            path.symlink_to(snapshot)
    return directory


def hashes(directory: Path) -> dict[str, str]:
    """Return the hash of every file below a directory, and the target of every link."""
    return {
        str(path.relative_to(directory)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def place(path: Path) -> Path:
    """Return a checkpoint's own directory: in a hub cache, of the snapshot."""
    return path.resolve()


def light_commands(inputs: Path, out: Path) -> dict[str, list[Any]]:
    base = place(inputs / "base")
    finetune = place(inputs / "finetune")
    recipe = inputs.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(inputs, out / "run")))
    return {
        "inspect": ["inspect", finetune, "--base", base],
        "graft": ["graft", finetune, "--from", base, "--out", out / "graft"],
        "graft --copy": ["graft", finetune, "--from", base, "--out", out / "copy", "--copy"],
        "graft over": ["graft", base, "--from", base, "--out", out / "over"],
        "merge": ["merge", base, "--adapter", inputs / "lora", "--out", out / "merge"],
        "export": ["export", base, "--out", out / "export"],
        "export --head-only": ["export", base, "--head-only", "--out", out / "alone"],
        "export --gguf": ["export", base, "--gguf", "f16", "--out", out / "gguf"],
        "generate": ["generate", base, "--prompt", "say 1", "--max-new-tokens", 4],
        "init": ["init", out / "new.yaml", "--trunk", finetune, "--base", base],
        "check": ["check", recipe],
    }


def test_no_command_changes_a_file_of_its_inputs(inputs: Path, out: Path) -> None:
    out.mkdir()
    before = hashes(inputs)
    for name, argv in light_commands(inputs, out).items():
        assert run_command(*argv) == 0, name
        assert hashes(inputs) == before, name
    # Editing an export's small files, or replacing its shards, does not change the source either.
    named = {"graft", "copy", "over", "merge", "export"}
    for written in (out / name for name in named):
        files = {info.file for info in open_checkpoint(written).tensors.values()}
        assert {file.name for file in written.rglob("*.safetensors")} == files
        assert (written / INDEX_FILE).is_file() or files == {SINGLE_FILE}


@pytest.mark.slow
def test_no_command_that_decodes_or_trains_changes_a_file_of_its_inputs(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = laid_out(saved, tmp_path / "in", "hub_cache")
    shorten_probes(monkeypatch)
    monkeypatch.chdir(tmp_path)
    base = place(inputs / "base")
    finetune = place(inputs / "finetune")
    data = inputs / "chats.jsonl"
    recipe = tmp_path / "recipe.yaml"
    answers = tmp_path / "answers.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(inputs, tmp_path / "run", **LEARNS)))
    answers.write_text(yaml.safe_dump(tiny_mapping(inputs, tmp_path / "answers", **LEARNS)))
    suite = ["--suite", data, "--prompts-per-task", 2, "--max-new-tokens", 6, "--temperatures", 0]
    before = hashes(inputs)
    for argv in (
        ["regenerate", answers],
        ["run", recipe],
        ["export", "run", "--out", "exported"],
        ["probe", finetune, "--from", base, "--data", data, "--out", "probe"],
        ["evaluate", base, *suite, "--out", "study"],
        ["compare", f"vanilla={base}", f"graft={finetune}+{base}", *suite, "--out", "compared"],
        ["rescue", finetune, "--from", base, "--data", data, "--out", "rescued", "--set", *TINY_RESCUE],
    ):
        assert run_command(*argv) == 0, argv
        assert hashes(inputs) == before, argv
    for written in ("run/export", "exported", "rescued/export"):
        tensors = all_tensors(tmp_path / written)
        trunk = all_tensors(finetune)
        assert holds(tensors, trunk)
