"""A checkpoint that cannot be used is not called healthy, and no command takes it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_packed_heads import int4
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed

from adapters import write_adapter
from checkpoints import rewrite, save_stripped, set_fields
from gguf_files import checkpoint_with_head
from mtp_train import graft, inspect
from mtp_train.checkpoints.files import SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.trunk.load import load_trunk
from mtp_train.trunk.whole import diagnose_trunk
from runs import Capture, document, paste, refusal, run_command
from tiny import tiny_trunk

LAYER = "model.layers.1.mlp.up_proj.weight"
LM_HEAD = "lm_head.weight"
HEAD = "mtp.fc.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_with_head(tmp_path_factory.mktemp("saved") / "base", "qwen3_5")


@pytest.fixture
def base(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "base"))


def stored_as(key: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda tensors: tensors.update({key: tensors[key].to(dtype)}))


def without(*keys: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda tensors: [tensors.pop(key) for key in keys])


def poisoned(key: str) -> Callable[[Path], None]:
    return lambda path: rewrite(path, lambda tensors: tensors[key].view(-1)[:1].fill_(float("nan")))


def misshapen(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({LAYER: tensors[LAYER][:-1].clone()}))


def layer_gone(path: Path) -> None:
    keys = [key for key in load_file(path / SINGLE_FILE) if key.startswith("model.layers.2.")]
    assert len(keys) > 5
    without(*keys)(path)


# What is done to a checkpoint with a head, its status then, and what every message names.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "integer head": (stored_as(HEAD, torch.int64), "partial", rf"{HEAD}: found I64, expected a floating-point dtype"),
    "bool head": (stored_as(HEAD, torch.bool), "partial", rf"{HEAD}: found BOOL, expected a floating-point dtype"),
    "FP8 head without scales": (stored_as(HEAD, torch.float8_e4m3fn), "partial", rf"{HEAD}.* F8_E4M3 without scales"),
    "integer trunk": (stored_as(LAYER, torch.int32), "damaged", rf"{LAYER}: found I32, expected a floating-point"),
    "FP8 trunk without scales": (stored_as(LAYER, torch.float8_e4m3fn), "damaged", rf"{LAYER}.* F8_E4M3 without"),
    "missing tensor": (without(LAYER), "damaged", rf"trunk weights missing: {LAYER}"),
    "missing layer": (layer_gone, "damaged", r"trunk weights missing: model\.layers\.2\.\S+ \(\d+ in all\)"),
    "misshapen layer": (misshapen, "damaged", rf"trunk shape mismatch: {LAYER}: found \[47, 32\], expected \[48, 32\]"),
    "untied without lm_head": (without(LM_HEAD), "damaged", rf"trunk weights missing: {LM_HEAD}"),
    "another vocabulary": (
        lambda path: set_fields(path, {"vocab_size": 271}),
        "damaged",
        r"trunk shape mismatch: \S+: found \[272, 32\], expected \[271, 32\] \(2 in all\)",
    ),
    "a size of zero": (
        lambda path: set_fields(path, {"intermediate_size": 0}),
        "partial",
        r"(trunk|head) shape mismatch: \S+: found \[\d+, \d+\], expected \[(32, 0|0, 32)\]",
    ),
    "NaN in the trunk": (poisoned(LAYER), "damaged", rf"NaN or infinite values: {LAYER}|{LAYER} holds NaN"),
    "NaN in the head": (poisoned(HEAD), "damaged", rf"NaN or infinite values: {HEAD}|{HEAD} holds NaN"),
    "an adapter beside": (
        lambda path: write_adapter(path, path),
        "damaged",
        r"adapter_config\.json beside the model, which transformers applies",
    ),
}


def takers(path: Path, out: Path) -> list[list[Any]]:
    """Commands that need a whole checkpoint with its head."""
    return [
        ["generate", path, "--prompt", "say 1", "--max-new-tokens", "2"],
        ["export", path, "--out", out],
        ["export", path, "--head-only", "--out", out],
        ["export", path, "--gguf", "f16", "--out", out],
    ]


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_by_inspect_and_refused_by_every_command(
    name: str, base: Path, out: Path, capfd: Capture
) -> None:
    damage, status, message = DAMAGES[name]
    damage(base)
    found = document(["inspect", base], capfd)
    assert found["status"] == status
    reported = [*found["problems"], *found["dtype_errors"]]
    assert any(re.search(message, one) for one in reported), reported
    assert all(text.startswith("no: ") for text in found["serves"].values())
    assert found["cure"] is not None
    for argv in takers(base, out):
        assert re.search(message, refusal(argv, capfd))
    assert not out.exists()


def test_the_same_checkpoint_undamaged_is_healthy_and_taken(saved: Path, out: Path, capfd: Capture) -> None:
    found = document(["inspect", saved], capfd)
    assert (found["status"], found["problems"], found["cure"]) == ("healthy", [], None)
    for number, argv in enumerate(takers(saved, out)):
        assert run_command(*argv[:-1], f"{argv[-1]}{number}") == 0


def test_the_cure_of_an_adapter_beside_a_model_works(base: Path, capfd: Capture) -> None:
    write_adapter(base, base)
    cure = document(["inspect", base], capfd)["cure"]
    assert cure.startswith("mtp-train merge ")
    assert document(["inspect", paste(cure)], capfd)["status"] == "healthy"


@pytest.mark.parametrize("lost", ["a tensor", "a layer"])
def test_a_trunk_that_lost_weights_is_damaged_with_or_without_its_head(
    lost: str, saved: Path, base: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    layer_gone(base) if lost == "a layer" else without(LAYER)(base)
    without(*(key for key in load_file(base / SINGLE_FILE) if key.startswith("mtp.")))(base)
    # The right base is not blamed, and a head does not cure it.
    for argv in (["inspect", base], ["inspect", base, "--base", saved]):
        found = document(argv, capfd)
        assert (found["status"], found["present_modules"]) == ("damaged", 0)
        assert found["problems"][0].startswith("trunk weights missing: model.layers.")
        assert found["cure"] == f"hf download CHECKPOINT --local-dir {base}-original --force-download"
    assert "trunk weights missing" in refusal(["graft", base, "--from", saved, "--out", out], capfd)
    # Of a base that lost weights, the base is named.
    whole = save_stripped(tiny_trunk("qwen3_5", vocab_size=272), tmp_path / "whole")
    message = refusal(["inspect", whole, "--base", base], capfd)
    assert message.startswith(f"mtp-train: {base}: lacks trunk module layers.")


def head_weights(path: Path) -> dict[str, Tensor]:
    opened = open_checkpoint(path)
    return build_head(graft_plan(opened, opened, "auto"), text_config_of(opened), dtype=torch.float32).state_dict()


@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe"])
def test_a_trunk_that_lost_a_layer_on_purpose_gets_the_head_of_the_whole_one(
    family_name: str, tmp_path: Path, out: Path
) -> None:
    """Its later layers have other numbers, and glm4_moe's head another key."""
    whole = checkpoint_with_head(tmp_path / "whole", family_name)
    model = AutoModelForCausalLM.from_pretrained(whole)
    types = getattr(model.config, "layer_types", None)
    del model.model.layers[1]
    model.config.num_hidden_layers -= 1
    if types is not None:
        model.config.layer_types = [*types[:1], *types[2:]]
    model.save_pretrained(tmp_path / "pruned")
    graft(tmp_path / "pruned", whole, out)
    assert inspect(out, whole).status == "healthy"
    trunks = [load_trunk(open_checkpoint(path), dtype="auto") for path in (out, tmp_path / "pruned")]
    tokens_1T = torch.arange(5)[None]
    torch.testing.assert_close(*(trunk.hidden(tokens_1T) for trunk in trunks), rtol=0, atol=0)
    found, expected = map(head_weights, (out, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (misshapen, rf"trunk weight {LAYER} is \[47, 32\], by config\.json it is \[48, 32\]"),
        (without(LAYER), rf"trunk weight {LAYER} is missing"),
    ],
)
def test_loading_refuses_a_trunk_that_is_not_whole(damage: Callable[[Path], None], message: str, base: Path) -> None:
    opened = open_checkpoint(base)
    load_trunk(opened, dtype="auto")
    damage(base)
    with pytest.raises(CheckpointError, match=message):
        load_trunk(opened, dtype="auto")


def test_a_launch_with_zero_3_is_checked_like_any_other(base: Path) -> None:
    class Config:
        def is_zero3(self) -> bool:
            return True

    config = Config()
    deepspeed.set_hf_deepspeed_config(config)
    try:
        assert diagnose_trunk(open_checkpoint(base)).problems == ()
        misshapen(base)
        assert diagnose_trunk(open_checkpoint(base)).shape_errors
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()


# Quantised trunks


def packed(path: Path, key: str) -> None:
    """Store a matrix as four-bit methods do."""
    rewrite(path, lambda tensors: tensors.update(int4(key.removesuffix(".weight"), tensors.pop(key).shape)))


def in_fp8(path: Path, key: str, scales: str = "weight_scale_inv") -> None:
    stored_as(key, torch.float8_e4m3fn)(path)
    rewrite(path, lambda tensors: tensors.update({key.removesuffix("weight") + scales: torch.ones(1, 1)}))


def in_fp8_by_row(path: Path, key: str) -> None:
    in_fp8(path, key, "weight_scale")


@pytest.mark.parametrize(("store", "method"), [(packed, "awq"), (in_fp8, "fp8"), (in_fp8_by_row, "compressed-tensors")])
def test_a_quantised_trunk_is_whole_and_damage_of_one_in_fp8_is_seen(
    store: Callable[[Path, str], None], method: str, base: Path, capfd: Capture
) -> None:
    store(base, LAYER)
    set_fields(base, {"quantization_config": {"quant_method": method}})
    found = document(["inspect", base], capfd)
    assert (found["status"], found["problems"]) == ("healthy", [])
    without("model.layers.2.mlp.down_proj.weight", "model.norm.weight")(base)
    found = document(["inspect", base], capfd)
    gone = ["model.layers.2.mlp.down_proj.weight", "model.norm.weight"]
    # What packed weights unpack to is not known: such a trunk is compared when it is loaded.
    assert found["trunk_missing_keys"] == ([] if store is packed else gone)


# Headers


def test_inspect_reads_headers_and_blocks_and_no_tensor_whole(
    base: Path, saved: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(checkpoint: Checkpoint, key: str) -> Tensor:
        raise AssertionError(f"{key} was read whole")

    monkeypatch.setattr(Checkpoint, "read", refuse)
    assert document(["inspect", base, "--base", saved], capfd)["stale"] is False
    rewrite(base, lambda tensors: tensors[LAYER].add_(0.1))
    assert document(["inspect", base, "--base", saved], capfd)["stale"] is True
