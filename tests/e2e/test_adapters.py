"""A LoRA adapter through the commands: merged, worn unmerged, or taken for what it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import rename_keys, rewrite_config, write_adapter
from byte_tokenizer import CHATML
from checkpoints import all_tensors, rewrite
from json_files import read_json
from mtp_train.checkpoints.adapter import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from mtp_train.checkpoints.files import open_checkpoint
from runs import LEARNS, Capture, document, refusal, run_command, tree, write_recipe


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
    base = pristine / "base"
    merged = tmp_path / "merged"
    assert run_command("merge", base, "--adapter", adapter, "--out", merged) == 0
    expected = tokens([merged, "--depth", "0"], capfd)
    assert tokens([base, "--adapter", adapter, "--depth", "0"], capfd) == expected
    assert tokens([base, "--adapter", adapter, "--depth", "3"], capfd) == expected
    assert tokens([merged, "--depth", "3"], capfd) == expected
    assert tokens([base, "--depth", "0"], capfd) != expected


@pytest.mark.parametrize(
    "command",
    [
        "inspect LORA",
        "graft LORA --from BASE --out OUT",
        "export LORA --out OUT",
        "merge LORA --adapter LORA --out OUT",
        "generate LORA --prompt x",
        "run RECIPE model.trunk=LORA",
    ],
)
def test_an_adapter_in_the_place_of_a_checkpoint_is_named_with_its_cure(
    command: str, pristine: Path, adapter: Path, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    base = pristine / "base"
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, new_run)
    for word, path in {"LORA": adapter, "BASE": base, "OUT": tmp_path / "out", "RECIPE": recipe}.items():
        command = command.replace(word, str(path))
    message = refusal(command.split(" "), capfd)
    assert f"{adapter}: a peft adapter (LORA) of {base}, without a model; expected a checkpoint." in message
    assert f"'mtp-train merge {base} --adapter {adapter} --out {base}-merged'" in message
    rewrite_config(adapter, base_model_name_or_path=None)
    assert "mtp-train merge BASE --adapter" in refusal(command.split(" "), capfd)


def test_an_adapter_that_would_not_be_put_on_is_refused(
    pristine: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    base = pristine / "base"
    rename_keys(adapter, "model.model.layers", "model.model.language_model.layers")
    message = refusal(["generate", base, "--adapter", adapter, "--prompt", "x"], capfd)
    assert "a module of the vision-language model; expected modules of the text model" in message
    assert f"mtp-train merge {base} --adapter {adapter} --out" in message
    message = refusal(["generate", base, "--adapter", tmp_path / "nowhere", "--prompt", "x"], capfd)
    assert "nowhere: no adapter_config.json; expected a peft adapter directory" in message


def lose(word: str) -> Callable[[Path], object]:
    """Return what removes the tensors with a word in their names."""
    return lambda adapter: rewrite(
        adapter, lambda tensors: [tensors.pop(key) for key in [*tensors] if word in key], ADAPTER_FILE
    )


def poison(adapter: Path) -> None:
    rewrite(adapter, lambda tensors: next(iter(tensors.values())).view(-1)[:1].fill_(float("nan")), ADAPTER_FILE)


def with_dora(adapter: Path) -> None:
    """Put an adapter with magnitudes in the place of this one, for the checkpoint that this one is for."""
    base = read_json(adapter / ADAPTER_CONFIG_FILE)["base_model_name_or_path"]
    write_adapter(Path(base), adapter, use_dora=True)


def lose_magnitudes(adapter: Path) -> None:
    with_dora(adapter)
    lose("magnitude")(adapter)


def deny_dora(adapter: Path) -> None:
    with_dora(adapter)
    rewrite_config(adapter, use_dora=False)


# What is done to an adapter of q_proj and up_proj, and the message that must name it.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "lora_A alone": (
        lose("lora_B"),
        r"has no tensor for \S*lora_B|holds \{'lora_A': \[4, \d+\]\} of \S*; expected lora_A, lora_B of rank 4",
    ),
    "NaN": (poison, "holds NaN or infinite values"),
    "DoRA without magnitudes": (
        lose_magnitudes,
        r"has no tensor for \S*lora_magnitude_vector|expected lora_A, lora_B, lora_magnitude_vector of rank 4",
    ),
    "magnitudes without DoRA": (
        deny_dora,
        r"contains \S*lora_magnitude_vector\S*, for which|'lora_magnitude_vector': .*; expected lora_A, lora_B of rank",
    ),
    "renamed modules": (
        lambda path: rename_keys(path, ".mlp.", ".ffn."),
        r"has no tensor for \S*mlp\.up_proj\S*, which its config adapts|contains \S*ffn.up_proj\S*, for which"
        r"|adapts \S*ffn\.up_proj\.weight, for which",
    ),
    "changed base": (
        lambda path: rewrite_config(path, init_lora_weights="pissa"),
        "init_lora_weights is 'pissa'; expected a LoRA adapter that adds",
    ),
    "a module's tensors gone": (
        lose("layers.3.self_attn"),
        r"has no tensor for \S*layers\.3\.self_attn\.q_proj\S*, which its config",
    ),
    "more than the config says": (
        lambda path: rewrite_config(path, target_modules=["q_proj"]),
        r"contains \S*up_proj\S*, for which the trunk has no adapted module",
    ),
    "a config without a kind": (
        lambda path: (path / ADAPTER_CONFIG_FILE).write_text("{}"),
        "peft_type None; expected the kind of a peft",
    ),
    "no targets": (lambda path: rewrite_config(path, target_modules=["nothing"]), "peft cannot apply it to the trunk"),
}
MERGED_ANYWAY = ("a module's tensors gone", "more than the config says", "no targets")
"""Merging needs no more than the tensors that are there."""


@pytest.mark.parametrize("name", DAMAGES)
def test_an_adapter_that_would_not_take_effect_is_refused_merged_or_not(
    name: str, pristine: Path, adapter: Path, out: Path, capfd: Capture
) -> None:
    damage, message = DAMAGES[name]
    base = pristine / "base"
    damage(adapter)
    if name != "changed base":
        assert re.search(message, refusal(["generate", base, "--adapter", adapter, "--prompt", "x"], capfd))
    if name not in MERGED_ANYWAY:
        assert re.search(message, refusal(["merge", base, "--adapter", adapter, "--out", out], capfd))


# Before an export the adapter would be merged, else it is put on a trunk without weights.
@pytest.mark.parametrize(("exports", "name"), [(True, "changed base"), (False, "renamed modules")])
def test_a_run_refuses_such_an_adapter_before_training(
    exports: bool, name: str, pristine: Path, adapter: Path, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    damage, message = DAMAGES[name]
    damage(adapter)
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, new_run, export__enabled=exports)
    argv = ["run", recipe, f"model.trunk={pristine / 'base'}", f"model.adapter={adapter}"]
    assert re.search(message, refusal(argv, capfd))
    assert not (new_run / "state").exists()


def test_a_head_trained_on_an_adapter_is_exported_with_the_adapter_merged(
    pristine: Path, adapter: Path, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    base = pristine / "base"
    run_dir = new_run
    # Chats are trained on, and served, as the adapter was trained on them.
    template = f"{CHATML}{{# the adapter's #}}"
    (adapter / "chat_template.jinja").write_text(template)
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, run_dir, **LEARNS)
    overrides = [f"model.trunk={base}", f"model.adapter={adapter}"]
    assert document(["run", recipe, *overrides], capfd)["exit_code"] == 0
    document(["merge", base, "--adapter", adapter, "--out", tmp_path / "merged"], capfd)
    document(["export", run_dir, "--out", tmp_path / "again"], capfd)
    exported, merged, head = (all_tensors(path) for path in (run_dir / "export", tmp_path / "merged", base))
    assert exported.keys() == head.keys()
    is_head = open_checkpoint(base).layout.is_head_key
    assert all(torch.equal(value, merged[key]) for key, value in exported.items() if not is_head(key))
    assert any(not torch.equal(value, head[key]) for key, value in exported.items() if not is_head(key))
    assert any(not torch.equal(value, head[key]) for key, value in exported.items() if is_head(key))
    assert tree(tmp_path / "again") == tree(run_dir / "export")
    assert (run_dir / "export" / "chat_template.jinja").read_text() == template
    assert not list(run_dir.glob(".export*"))
    message = refusal(["export", run_dir, "--head-only", "--out", tmp_path / "alone"], capfd)
    assert f"its trunk has the unmerged adapter {adapter}" in message
