"""Heads that a quantisation method packed: named as such, and replaced by one in plain floats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import Tensors, all_tensors, base_and_finetune, fuse_experts, same, save_tensors, set_fields, shard
from mtp_train.checkpoints.files import SINGLE_FILE, JsonObject, open_checkpoint
from mtp_train.heads.diagnose import diagnose_head
from runs import Capture, document, paste, run_command
from tiny import FAMILY_NAMES

Pack = Callable[[str, tuple[int, ...]], Tensors]


def int4(module: str, shape: tuple[int, ...]) -> Tensors:
    rows, columns = shape
    return {
        f"{module}.qweight": torch.ones(columns, rows // 8, dtype=torch.int32),
        f"{module}.qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
        f"{module}.scales": torch.ones(1, rows, dtype=torch.float16),
    }


def gptq(module: str, shape: tuple[int, ...]) -> Tensors:
    return {**int4(module, shape), f"{module}.g_idx": torch.zeros(shape[1], dtype=torch.int32)}


def compressed(module: str, shape: tuple[int, ...]) -> Tensors:
    return {
        f"{module}.weight_packed": torch.ones(shape[0], shape[1] // 2, dtype=torch.uint8),
        f"{module}.weight_scale": torch.ones(shape[0], shape[1] // 16).to(torch.float8_e4m3fn),
        f"{module}.weight_global_scale": torch.ones(1),
        f"{module}.input_global_scale": torch.ones(1),
    }


def nvfp4(module: str, shape: tuple[int, ...]) -> Tensors:
    # The weight itself, half as wide, under its own name.
    return {
        f"{module}.weight": torch.ones(shape[0], shape[1] // 2, dtype=torch.uint8),
        f"{module}.weight_scale": torch.ones(shape[0], shape[1] // 16).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.ones(()),
        f"{module}.input_scale": torch.ones(()),
    }


def nf4(module: str, shape: tuple[int, ...]) -> Tensors:
    return {
        f"{module}.weight": torch.ones(shape[0] * shape[1] // 2, 1, dtype=torch.uint8),
        f"{module}.weight.absmax": torch.ones(shape[0] * shape[1] // 64),
        f"{module}.weight.quant_map": torch.ones(16),
        f"{module}.weight.quant_state.bitsandbytes__nf4": torch.ones(80, dtype=torch.uint8),
    }


MXFP4 = ("blocks", "scales")
METHODS: dict[str, tuple[Pack, JsonObject]] = {
    "awq": (int4, {"quant_method": "awq", "bits": 4}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "compressed-tensors": (compressed, {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}),
    "modelopt": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def pack_projections(
    path: Path, is_chosen: Callable[[str], bool], pack: Pack, settings: JsonObject | None
) -> list[str]:
    """Store the chosen projections as a method stores them, and declare the method; return their keys."""
    tensors = all_tensors(path)
    plain = [key for key in tensors if key.endswith("_proj.weight") and tensors[key].ndim == 2 and is_chosen(key)]
    for key in plain:
        tensors |= pack(key.removesuffix(".weight"), tuple(tensors.pop(key).shape))
    save_tensors(tensors, path / SINGLE_FILE)
    if settings is not None:
        set_fields(path, {"quantization_config": settings})
    return plain


def pack_head(path: Path, method: str = "awq") -> None:
    assert len(pack_projections(path, open_checkpoint(path).layout.is_head_key, *METHODS[method])) >= 7


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_a_packed_head_is_named_with_its_method_and_its_cure(
    method: str, family_name: str, tmp_path: Path, capfd: Capture
) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    original = shutil.copytree(base, tmp_path / "original")
    pack_head(base, method)
    found = document(["inspect", base], capfd)
    assert found["status"] == "quantised"
    assert (found["missing_keys"], found["unexpected_keys"], found["shape_errors"]) == ([], [], [])
    assert f"head quantised with {method}" in found["runs_here"]
    assert all(text.startswith(f"not verified: head quantised with {method}") for text in found["serves"].values())
    assert found["cure"] == f"mtp-train graft {base} --from BASE --out {base}-mtp"
    assert document(["inspect", paste(found["cure"].replace("BASE", str(original)))], capfd)["status"] == "healthy"


def test_what_is_lost_beside_is_still_damage(base: Path, capfd: Capture) -> None:
    pack_head(base)
    tensors = load_file(base / SINGLE_FILE)
    for lost in ("mtp.norm.weight", "mtp.layers.0.mlp.up_proj.qweight"):
        without = {key: value for key, value in tensors.items() if not key.startswith(lost.rpartition(".")[0])}
        save_tensors(without, base / SINGLE_FILE)
        found = document(["inspect", base], capfd)
        assert (found["status"], len(found["missing_keys"])) == ("partial", 1)
    tensors["mtp.extra.qweight"] = torch.ones(1, dtype=torch.int32)
    save_tensors(tensors, base / SINGLE_FILE)
    assert document(["inspect", base], capfd)["unexpected_keys"] == ["mtp.extra.qweight"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_in_plain_floats_takes_its_place(method: str, sharded: bool, base: Path, saved: Path, out: Path) -> None:
    pack_head(base, method)
    before = all_tensors(base)
    plain = all_tensors(saved / "base")
    if sharded:
        shard(base)
    assert run_command("graft", base, "--from", saved / "base", "--out", out) == 0
    written = all_tensors(out)
    assert same(written, {key: (plain if key.startswith("mtp.") else before)[key] for key in plain})
    assert diagnose_head(open_checkpoint(out)).complete
    # No file holds what the index does not name, as engines read whole files.
    in_files = [key for file in out.glob("*.safetensors") for key in load_file(file)]
    assert sorted(in_files) == sorted(written)
    # A weight that is stored under its own name is replaced in its file.
    if (index := open_checkpoint(out).index) is not None:
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in written.values())
    assert "mtp" in json.dumps(json.loads((out / "config.json").read_text())["quantization_config"])


@pytest.mark.parametrize("donor_is_stacked", [False, True])
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_stacked_experts_that_are_packed_are_named_and_replaced(
    method: str, donor_is_stacked: bool, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    donor, _ = base_and_finetune(tmp_path / "plain", "qwen3_5_moe")
    path = fuse_experts(base_and_finetune(tmp_path / "packed", "qwen3_5_moe")[0])
    if donor_is_stacked:
        fuse_experts(donor)
    tensors = load_file(path / SINGLE_FILE)
    stacks = [key for key in tensors if key.startswith("mtp.") and key.endswith(("gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 2
    for key in stacks:
        value = tensors.pop(key)
        if method == "fp8":
            tensors |= {key: value.to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(len(value), 1, 1)}
        else:
            tensors |= {f"{key}_{half}": torch.ones(*value.shape[:-1], 2, dtype=torch.uint8) for half in MXFP4}
    save_tensors(tensors, path / SINGLE_FILE)
    set_fields(path, {"quantization_config": {"quant_method": method}})
    found = document(["inspect", path], capfd)
    assert (found["status"], found["missing_keys"], found["unexpected_keys"]) == ("quantised", [], [])
    assert f"head quantised with {method}" in found["runs_here"]
    document(["graft", path, "--from", donor, "--out", out], capfd)
    assert document(["inspect", out], capfd)["status"] == "healthy"
    heads = [
        {key: value for key, value in all_tensors(path).items() if key.startswith("mtp.")} for path in (out, donor)
    ]
    assert same(*heads)
