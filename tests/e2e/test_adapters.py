"""A LoRA adapter through the commands: merged, worn unmerged, or taken for what it is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import rename_keys, rewrite_config, write_adapter
from checkpoints import all_tensors
from mtp_train.cli import main
from mtp_train.heads.diagnose import layout_of
from mtp_train.weights.files import open_checkpoint
from runs import LEARNS, document, tree, write_recipe

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


def test_a_head_trained_on_an_adapter_is_exported_with_the_adapter_merged(
    pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    base, run_dir = pristine / "base", tmp_path / "run"
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, run_dir, **LEARNS)
    overrides = [f"model.trunk={base}", f"model.adapter={adapter}"]
    assert document(["run", recipe, *overrides], capfd)["exit_code"] == 0
    document(["merge", base, "--adapter", adapter, "--out", tmp_path / "merged"], capfd)
    document(["export", run_dir, "--out", tmp_path / "again"], capfd)
    exported, merged, head = (all_tensors(path) for path in (run_dir / "export", tmp_path / "merged", base))
    assert exported.keys() == head.keys()
    is_head = layout_of(open_checkpoint(base)).is_head_key
    assert all(torch.equal(value, merged[key]) for key, value in exported.items() if not is_head(key))
    assert any(not torch.equal(value, head[key]) for key, value in exported.items() if not is_head(key))
    assert any(not torch.equal(value, head[key]) for key, value in exported.items() if is_head(key))
    assert tree(tmp_path / "again") == tree(run_dir / "export")
    assert not list(run_dir.glob(".export*"))
    message = refusal(["export", run_dir, "--head-only", "--out", tmp_path / "alone"], capfd)
    assert f"its trunk wears the adapter {adapter}" in message


def test_an_adapter_that_cannot_be_merged_stops_a_run_that_exports_before_it_begins(
    pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, tmp_path / "run")
    rewrite_config(adapter, init_lora_weights="pissa")
    message = refusal(["run", recipe, f"model.trunk={pristine / 'base'}", f"model.adapter={adapter}"], capfd)
    assert "changed the base's weights before training" in message
    assert not (tmp_path / "run" / "state").exists()
