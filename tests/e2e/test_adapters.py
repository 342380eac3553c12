"""A LoRA adapter through the commands: merged, worn unmerged, or taken for what it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adapters import rename_keys, rewrite_config, write_adapter
from mtp_train.cli import main
from runs import document, write_recipe

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def adapter(pristine: Path, tmp_path: Path) -> Path:
    # Large enough that the text changes.
    write_adapter(pristine / "base", tmp_path / "lora", target_modules=["q_proj", "up_proj"], lora_alpha=2)
    return tmp_path / "lora"


def tokens(argv: list[Any], capfd: Capture) -> list[list[int]]:
    found = document(["generate", *argv, "--prompt", "say 1", "--max-new-tokens", "16"], capfd)
    return [one["token_ids"] for one in found["requests"]]


def test_an_adapter_decodes_unmerged_as_it_does_merged(
    pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    base, merged = pristine / "base", tmp_path / "merged"
    assert main(["merge", str(base), "--adapter", str(adapter), "--out", str(merged)]) == 0
    expected = tokens([merged, "--depth", "0"], capfd)
    assert tokens([base, "--adapter", adapter, "--depth", "0"], capfd) == expected
    assert tokens([base, "--adapter", adapter, "--depth", "3"], capfd) == expected
    assert tokens([merged, "--depth", "3"], capfd) == expected
    assert tokens([base, "--depth", "0"], capfd) != expected


def refusal(argv: list[Any], capfd: Capture) -> str:
    capfd.readouterr()
    assert main([str(word) for word in argv]) == 2
    message = capfd.readouterr().err
    assert re.fullmatch(r"mtp-train: [^\n]+: [^\n]+; expected [^\n]+\. [A-Z][^\n]+\.\n", message)
    return message


@pytest.mark.parametrize("command", ["inspect", "graft", "export", "merge", "generate", "run"])
def test_an_adapter_in_the_place_of_a_checkpoint_is_named_with_its_cure(
    command: str, pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    base = pristine / "base"
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, tmp_path / "run")
    argv: dict[str, list[Any]] = {
        "inspect": ["inspect", adapter],
        "graft": ["graft", adapter, "--from", base, "--out", tmp_path / "out"],
        "export": ["export", adapter, "--out", tmp_path / "out"],
        "merge": ["merge", adapter, "--adapter", adapter, "--out", tmp_path / "out"],
        "generate": ["generate", adapter, "--prompt", "x"],
        "run": ["run", recipe, f"model.trunk={adapter}"],
    }
    message = refusal(argv[command], capfd)
    assert f"{adapter}: a peft adapter (LORA) of {base}, without a model; expected a checkpoint." in message
    assert f"Run 'mtp-train merge {base} --adapter {adapter} --out {base}-merged', or train on it unmerged" in message
    assert f"model.trunk={base} model.adapter={adapter}" in message
    rewrite_config(adapter, base_model_name_or_path=None)
    assert "mtp-train merge BASE --adapter" in refusal(argv[command], capfd)


def test_an_adapter_that_would_not_be_put_on_is_refused(
    pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    base = pristine / "base"
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, tmp_path / "run", export__enabled=False)
    rename_keys(adapter, "model.model.layers", "model.model.language_model.layers")
    for argv in (
        ["generate", base, "--adapter", adapter, "--prompt", "x"],
        ["run", recipe, f"model.trunk={base}", f"model.adapter={adapter}", f"run_dir={tmp_path / 'other'}"],
    ):
        message = refusal(argv, capfd)
        assert "a module of the vision-language model; expected names of the text model" in message
        assert f"mtp-train merge {base} --adapter {adapter} --out" in message
    message = refusal(["generate", base, "--adapter", tmp_path / "nowhere", "--prompt", "x"], capfd)
    assert "nowhere: no adapter_config.json; expected a peft adapter directory" in message


def test_the_gate_s_cure_for_an_adapter_can_be_followed(
    pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    """The recipe that may not export says what to run; that command writes a checkpoint with the head kept."""
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, tmp_path / "run")
    asked = refusal(["check", recipe, f"model.trunk={pristine / 'base'}", f"model.adapter={adapter}"], capfd)
    command = re.search(r"'mtp-train (merge [^']+) --out MERGED'", asked)
    assert command is not None
    found = document([*command[1].split(), "--out", tmp_path / "merged"], capfd)
    assert found["head_keys"] > 5
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
