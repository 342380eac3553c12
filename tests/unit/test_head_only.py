from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, base_and_finetune, holds, set_fields, shard, wrap_as_vision_language
from mtp_train.checkpoints.export import write_head_only
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.checkpoints.native import native_head_of
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import diagnose_head, text_config_of
from runs import Capture, document, run_command, tree
from tiny import ALL_FAMILIES, FAMILY_NAMES


def base_of(directory: Path, family_name: str, *, tied: bool = False) -> Path:
    base, _ = base_and_finetune(directory, family_name, tied=tied)
    byte_tokenizer().save_pretrained(base)
    (base / "generation_config.json").write_text('{"eos_token_id": 3}')
    return base


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_alone_opens_again_bit_for_bit(
    family_name: str, sharded: bool, tied: bool, tmp_path: Path, out: Path
) -> None:
    base = base_of(tmp_path, family_name, tied=tied)
    before = all_tensors(base)
    if sharded:
        shard(base)
    assert run_command("export", base, "--out", out, "--head-only") == 0
    written = all_tensors(out)
    checkpoint = open_checkpoint(out)
    layout = checkpoint.layout
    expected = {key for key in before if layout.is_head_key(key)} | {"model.embed_tokens.weight"}
    assert written.keys() == expected | (set() if tied else {"lm_head.weight"})
    assert holds(before, written)
    assert diagnose_head(checkpoint).complete
    # One file, no index beside it: loaders agree on that.
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    others = {name: data for name, data in tree(base).items() if ".safetensors" not in name}
    assert {name: data for name, data in tree(out).items() if ".safetensors" not in name} == others
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= others.keys()
    plan = graft_plan(checkpoint, checkpoint, "auto")
    build_head(plan, text_config_of(checkpoint), dtype=torch.float32)


@pytest.mark.skipif("inkling" not in ALL_FAMILIES, reason="this transformers has no Inkling")
def test_a_head_takes_the_norm_of_its_trunk_s_embedding_along(tmp_path: Path, out: Path) -> None:
    base = base_of(tmp_path, "inkling")
    assert run_command("export", base, "--out", out, "--head-only") == 0
    written = {key for key in all_tensors(out) if ".mtp." not in key}
    assert written == {f"model.llm.{name}.weight" for name in ("embed", "embed_norm", "unembed")}
    assert diagnose_head(open_checkpoint(out)).complete


def test_a_wrapper_s_head_keeps_the_wrapper_s_names(tmp_path: Path, out: Path) -> None:
    base = wrap_as_vision_language(base_of(tmp_path, "qwen3_5"))
    set_fields(base, {"mtp_num_hidden_layers": None})
    assert run_command("export", base, "--out", out, "--head-only") == 0
    written = all_tensors(out)
    assert {key for key in written if not key.startswith("mtp.")} == {
        "model.language_model.embed_tokens.weight",
        "lm_head.weight",
    }
    config = json.loads((out / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_a_wrapper_that_names_the_lm_head_too_keeps_it(tmp_path: Path, out: Path) -> None:
    base = base_of(tmp_path, "qwen3_5")
    tensors = load_file(base / SINGLE_FILE)
    renamed = {key.replace("lm_head.", "language_model.lm_head."): value for key, value in tensors.items()}
    save_file(renamed, base / SINGLE_FILE)
    checkpoint = open_checkpoint(base)
    write_head_only(checkpoint, native_head_of(checkpoint, checkpoint.layout), out)
    assert "language_model.lm_head.weight" in all_tensors(out)


def test_the_command_says_how_to_draft_with_it(tmp_path: Path, capfd: Capture) -> None:
    base = base_of(tmp_path, "qwen3_5")
    out = tmp_path / "my head"
    found = document(["export", base, "--out", out, "--head-only"], capfd)
    *command, flag, value = shlex.split(found["serves"]["vllm"])
    assert (command, flag) == (["vllm", "serve", str(base)], "--speculative-config")
    assert json.loads(value) == {"method": "mtp", "model": str(out), "num_speculative_tokens": 3}
    serves = document(["inspect", out], capfd)["serves"]
    assert all(text.startswith("no: holds a head without its trunk") for text in serves.values())
    assert found["serves"]["vllm"].removeprefix(f"vllm serve {base} ") in serves["vllm"]
    assert document(["inspect", base], capfd)["serves"]["vllm"].startswith("vllm serve")


def test_a_new_head_takes_the_place_of_the_stored_one(out: Path, run_dir: Path) -> None:
    """A run's trained head is written, with the trunk's embedding."""
    assert run_command("export", run_dir, "--out", out, "--head-only") == 0
    written = all_tensors(out)
    exported = all_tensors(run_dir / "export")
    assert holds(exported, written)
    assert any(key.startswith("mtp.") for key in written)
