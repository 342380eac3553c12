from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import (
    base_and_finetune,
    rewrite,
    save_stripped,
    save_with_head,
    set_fields,
    shard,
    wrap_as_vision_language,
)
from json_files import read_json, write_json
from mtp_train import inspect
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from runs import Capture, paste
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk


def count_field(family_name: str) -> str:
    return tiny_trunk(family_name).family.declaration.count or ""


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_release_is_healthy_and_says_how_to_serve_it(family_name: str, sharded: bool, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    if sharded:
        shard(base)
    found = inspect(base, base)
    assert (found.status, found.stale) == ("healthy", False)
    assert (found.head.declared_modules, found.head.present_modules) == (1, 1)
    assert found.trunk_changed is not None
    assert found.trunk_changed.share_of_tensors == 0
    assert found.serves["vllm"].startswith("vllm serve ")
    assert '"num_speculative_tokens":3' in found.serves["vllm"]
    assert found.cure is None
    assert "nothing to cure" in str(found)


def test_a_head_after_an_unlisted_number_of_layers_is_named_to_transformers_as_printed(tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "glm4_moe")
    # Releases have 46 or 92 layers.
    said = inspect(base).serves["transformers"]
    told, _, rest = said.removeprefix("once loaded, ").partition("; ")
    model = AutoModelForCausalLM.from_pretrained(base)
    exec(told, {"model": model})
    assert rest.startswith("model.generate(..., use_mtp=True)")
    model.generate(torch.arange(5)[None], use_mtp=True, max_new_tokens=4)
    set_fields(base, {"num_hidden_layers": 46})
    assert open_checkpoint(base).engines["transformers"].text == rest


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_what_save_pretrained_leaves_is_declared_but_missing_and_the_cure_works(
    family_name: str, tmp_path: Path
) -> None:
    base, finetune = base_and_finetune(tmp_path, family_name)
    found = inspect(finetune, base)
    assert (found.status, found.head.declared_modules, found.head.present_modules) == ("declared_but_missing", 1, 0)
    assert found.stale is None
    assert found.serves["vllm"].startswith("no: holds no head tensors")
    assert "\nevery engine: no: holds no head tensors" in str(found)
    assert (found.cure or "").startswith("mtp-train graft ")
    out = paste(found.cure)
    cured = inspect(out, base)
    assert (cured.status, cured.stale, cured.cure) == ("healthy", True, f"mtp-train probe {out} --from {base}")


@pytest.mark.parametrize("other", [0, 3])
def test_two_declarations_that_differ_are_named_and_cured(other: int, tmp_path: Path) -> None:
    """At the top level of a vision-language model's config, and in its text config."""
    base, finetune = (wrap_as_vision_language(path) for path in base_and_finetune(tmp_path, "qwen3_5"))
    assert inspect(base).status == "healthy"
    declare(base, mtp_num_hidden_layers=1)
    assert inspect(base).status == "healthy"
    declare(base, mtp_num_hidden_layers=other)
    found = inspect(base)
    told = f"mtp_num_hidden_layers = {other} and text_config.mtp_num_hidden_layers = 1"
    assert (found.status, found.serves["vllm"]) == (
        "undeclared",
        f"no: config.json declares {told}, and engines read one or the other",
    )
    assert inspect(paste(found.cure)).status == "healthy"
    declare(finetune, mtp_num_hidden_layers=other)
    set_fields(finetune, {"mtp_num_hidden_layers": 3 - other})
    found = inspect(finetune, base)
    assert found.status == "declared_but_missing"
    assert inspect(paste(found.cure)).status == "healthy"


def declare(path: Path, **fields: int) -> None:
    config = read_json(path / "config.json")
    write_json(path / "config.json", config | fields)


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_missing_key_is_partial(family_name: str, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    lost = "mtp.norm.weight" if family_name == "qwen3_5" else "model.layers.3.mlp.experts.2.up_proj.weight"
    found = inspect(rewrite(base, lambda tensors: tensors.pop(lost)))
    assert (found.status, found.head.missing_keys) == ("partial", (lost,))


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_no_trace_of_a_head_is_stripped_or_none(family_name: str, tmp_path: Path) -> None:
    base, finetune = base_and_finetune(tmp_path, family_name)
    set_fields(finetune, {count_field(family_name): 0})
    assert inspect(finetune, base).status == "stripped"
    alone = inspect(finetune)
    assert (alone.status, alone.head.missing_keys) == ("none", ())
    # Releases of these families have a head: the base tells whether this one had.
    assert alone.cure == f"mtp-train inspect {finetune} --base BASE"


def test_a_retrained_head_on_a_changed_trunk_is_not_stale(base: Path, tmp_path: Path) -> None:
    other = tiny_trunk("qwen3_5", seed=5)
    tuned = save_with_head(other, tiny_head(other, seed=7), tmp_path / "tuned")
    found = inspect(tuned, base)
    assert (found.status, found.stale) == ("healthy", False)
    assert found.trunk_changed is not None
    assert found.trunk_changed.share_of_tensors == 1
    assert found.trunk_changed.largest_relative_change > 0.1


def test_json_holds_the_fields_of_the_contract(tmp_path: Path, capsys: Capture) -> None:
    path = save_stripped(tiny_trunk("glm4_moe"), tmp_path / "stripped")
    assert main(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() >= {
        *("family", "declared_modules", "present_modules", "status", "stale", "missing_keys", "unexpected_keys"),
        *("shape_errors", "non_finite_keys", "trunk_changed", "serves", "cure"),
    }
    assert document["serves"].keys() >= {"vllm", "sglang", "llama.cpp", "transformers"}
    assert document["cure"].endswith(f"--from BASE --out {path}-mtp")


def test_the_model_card_names_the_base_for_the_cure(base: Path, finetune: Path) -> None:
    (finetune / "README.md").write_text("---\nlicense: mit\nbase_model: Qwen/Qwen3.5-4B\n---\n# card\n")
    assert "--from Qwen/Qwen3.5-4B " in (inspect(finetune).cure or "")
    # A checkpoint of that name beside this one is the base.
    (finetune / "README.md").write_text("---\nbase_model: someone/base\n---\n")
    command = shlex.split(inspect(finetune).cure or "")
    assert command[:5] == ["mtp-train", "graft", str(finetune), "--from", str(base)]
    assert main(command[1:]) == 0
