from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from test_packed_heads import int4, pack_projections
from torch import Tensor
from transformers.quantizers.quantizers_utils import should_convert_module

from checkpoints import Tensors, all_tensors, base_and_finetune, own_head, rewrite, same, save_tensors, set_fields
from json_files import read_json, write_json
from mtp_train.checkpoints import files
from mtp_train.checkpoints.files import SINGLE_FILE, JsonObject, open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.heads.build import graft_plan
from mtp_train.heads.diagnose import diagnose_head, stored_dtype
from mtp_train.runs.checkpoint_tools.inspect import compare_trunks
from mtp_train.trunk.load import load_trunk
from runs import Capture, document, run_command
from tiny import FAMILY_NAMES, IS_OLD

BLOCK = 16
FP8: JsonObject = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def to_fp8(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in FP8, the scales of its blocks, and what the two stand for, written out block by block."""
    rows = -(-value.shape[0] // BLOCK)
    columns = -(-value.shape[1] // BLOCK)
    stored = value.to(torch.float8_e4m3fn)
    plain = value.clone()
    scales = torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = value[block].abs().max() / 400
            stored[block] = (value[block] / scales[row, column]).to(torch.float8_e4m3fn)
            plain[block] = stored[block].float() * scales[row, column]
    return stored, scales, plain


def quantise(path: Path, pattern: str, settings: JsonObject | None = None) -> Tensors:
    """Store the matrices whose keys match in FP8; return what they stand for."""
    tensors = all_tensors(path)
    plain = {}
    for key in [key for key in tensors if re.search(pattern, key) and tensors[key].ndim == 2]:
        tensors[key], tensors[key.removesuffix("weight") + "weight_scale_inv"], plain[key] = to_fp8(tensors[key])
    assert plain
    save_tensors(tensors, path / SINGLE_FILE)
    set_fields(path, {"quantization_config": settings or FP8})
    return plain


def pack(path: Path, settings: JsonObject) -> None:
    """Store some matrices of the trunk as four-bit methods do: other keys, dtypes and shapes."""
    pack_projections(path, lambda key: key.endswith("self_attn.q_proj.weight"), int4, settings)


def graft(finetune: Path, base: Path, out: Path) -> int:
    return run_command("graft", finetune, "--from", base, "--out", out)


def quantisation(path: Path) -> JsonObject:
    return read_json(path / "config.json")["quantization_config"]


def head_layers(path: Path) -> list[str]:
    """Return the head's linear modules in a checkpoint."""
    checkpoint = open_checkpoint(path)
    layout = checkpoint.layout
    return [
        key.removesuffix(".weight")
        for key, info in checkpoint.tensors.items()
        if layout.is_head_key(key) and layout.shared_key(key) is None and len(info.shape) == 2
    ]


# The list of exceptions


@pytest.mark.skipif(IS_OLD, reason="an older transformers takes layer 3 for layer 30")
def test_transformers_reads_the_list_the_same_way(tmp_path: Path, out: Path) -> None:
    base, finetune = base_and_finetune(tmp_path, "glm4_moe")
    quantise(finetune, r"layers\..*_proj\.weight")
    assert graft(finetune, base, out) == 0
    listed = quantisation(out)["modules_to_not_convert"]
    assert not any(should_convert_module(module, listed) for module in head_layers(out))
    assert should_convert_module("model.layers.0.mlp.down_proj", listed)
    assert should_convert_module("model.layers.30.mlp.down_proj", listed)


def test_modelopt_s_own_file_says_it_too(base: Path, finetune: Path, out: Path) -> None:
    pack(finetune, {"quant_method": "modelopt", "ignore": ["mtp*"]})
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    write_json(finetune / "hf_quant_config.json", own)
    assert graft(finetune, base, out) == 0
    found = read_json(out / "hf_quant_config.json")
    assert found["quantization"]["exclude_modules"] == ["lm_head", "mtp*"]
    assert (out / "config.json").read_bytes() == (finetune / "config.json").read_bytes()


def test_an_unknown_method_is_refused(base: Path, finetune: Path, out: Path, capfd: Capture) -> None:
    set_fields(finetune, {"quantization_config": {"quant_method": "aqlm"}})
    assert graft(finetune, base, out) == 2
    assert "quantised with aqlm, whose list of exceptions is not supported; expected one of" in capfd.readouterr().err
    assert not out.exists()


# Heads and trunks in FP8


def test_a_head_in_fp8_is_whole_and_stays_as_it_is_in_its_own_checkpoint(
    base: Path, tmp_path: Path, capfd: Capture
) -> None:
    quantise(base, r"^mtp\.layers.*_proj\.weight|^model\.layers.*_proj\.weight", {**FP8, "modules_to_not_convert": []})
    assert diagnose_head(open_checkpoint(base)).complete
    assert stored_dtype(open_checkpoint(base)) == "F32"
    assert document(["inspect", base], capfd)["status"] == "healthy"
    set_fields(base, {"mtp_num_hidden_layers": None})
    for options in ([], ["--head-only"]):
        out = tmp_path / f"out{len(options)}"
        assert run_command("export", base, "--out", out, *options) == 0
        written = all_tensors(out)
        before = all_tensors(base)
        assert all(
            torch.equal(value.view(torch.uint8), before[key].view(torch.uint8)) for key, value in written.items()
        )
        assert diagnose_head(open_checkpoint(out)).complete
        assert quantisation(out) == quantisation(base)


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_head_in_fp8_is_read_with_its_scales(
    family_name: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Five rows of 32 columns are read at a time, and three such reads begin within the scales of 16 rows.
    monkeypatch.setattr(files, "BLOCK_ELEMENTS", 5 * 32)
    base, finetune = base_and_finetune(tmp_path, family_name)
    layout = open_checkpoint(base).layout
    heads = "|".join(key for key in all_tensors(base) if layout.is_head_key(key) and key.endswith("_proj.weight"))
    plain = quantise(base, heads)
    head = own_head(open_checkpoint(base))
    native = {key: value for name, tensor in head.state_dict().items() for key, value in layout.split(name, tensor)}
    # Grafted, it is in bf16, and without scales; elsewhere it stays what it was.
    assert graft(finetune, base, out) == 0
    written = all_tensors(out)
    assert not any("scale" in key for key in written)
    for key, value in plain.items():
        assert torch.equal(native[key], value.bfloat16().float())
        assert torch.equal(written[key], value.bfloat16())
    assert "quantization_config" not in read_json(out / "config.json")


def in_bf16_and_fp8(path: Path, pattern: str) -> Tensors:
    """Store a checkpoint as releases are: matrices in FP8, all other weights in bf16; return what they stand for."""
    plain = quantise(path, pattern)
    tensors = all_tensors(path)
    beside = {key: value.bfloat16() for key, value in tensors.items() if value.dtype == torch.float32}
    scales = {key: tensors[key] for key in tensors if key.endswith("_scale_inv")}
    save_tensors(tensors | beside | scales, path / SINGLE_FILE)
    return {key: value for key, value in (beside | plain).items() if key not in scales}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_trunk_in_fp8_runs_as_the_weights_it_stands_for(family_name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    reference = Path(shutil.copytree(base, tmp_path / "reference"))
    plain = in_bf16_and_fp8(base, r"layers\.\d+\.(self_attn|mlp)\..*_proj\.weight")
    save_tensors(plain, reference / SINGLE_FILE)
    found, expected = (load_trunk(open_checkpoint(path), dtype=dtype) for path in (base, reference))
    # Not all in `dtype`: transformers keeps the routers of many mixtures in fp32, from 5.24.
    assert [value.dtype for value in found.parameters()] == [value.dtype for value in expected.parameters()]
    tokens_1T = torch.arange(9)[None]
    assert torch.equal(found.hidden(tokens_1T), expected.hidden(tokens_1T))


def test_a_trunk_in_fp8_with_a_smaller_last_block_is_refused(base: Path) -> None:
    """transformers would divide 48 rows with two scales into blocks of 24 rows instead of 32 and 16."""
    key = "model.layers.0.mlp.up_proj.weight"
    quantise(base, re.escape(key), {**FP8, "weight_block_size": [32, 32]})
    rewrite(base, lambda tensors: tensors.update({f"{key}_scale_inv": torch.ones(2, 1)}))
    with pytest.raises(CheckpointError, match=rf"{key} is \[48, 32\] in FP8, in blocks of 32 x 32; expected whole"):
        load_trunk(open_checkpoint(base), dtype=torch.float32)


def test_scales_that_do_not_fit_are_refused(base: Path, finetune: Path, out: Path, capfd: Capture) -> None:
    quantise(base, r"^mtp\..*_proj\.weight", {**FP8, "weight_block_size": [8, 8]})
    assert graft(finetune, base, out) == 2
    assert "expected one for each block of 8 x 8. Restore weight_block_size" in capfd.readouterr().err
    rewrite(base, lambda tensors: [tensors.pop(key) for key in [*tensors] if "scale" in key])
    assert graft(finetune, base, out) == 2
    assert "found F8_E4M3 without scales, expected scales beside it" in capfd.readouterr().err


def test_a_new_head_takes_the_place_of_one_in_fp8_and_its_scales(base: Path, tmp_path: Path, out: Path) -> None:
    (tmp_path / "other").mkdir()
    quantised, _ = base_and_finetune(tmp_path / "other", "qwen3_5")
    quantise(quantised, r"^mtp\..*_proj\.weight")
    assert graft(quantised, base, out) == 0
    written = all_tensors(out)
    expected = all_tensors(base)
    assert same(written, expected)
    listed = quantisation(out)["modules_to_not_convert"]
    assert {*head_layers(out)} <= {*listed}


def test_a_quantised_trunk_is_compared_with_its_base_by_what_it_stands_for(
    base: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_ELEMENTS", 5 * 32)
    (tmp_path / "other").mkdir()
    quantised, _ = base_and_finetune(tmp_path / "other", "qwen3_5")
    plain = quantise(quantised, r"^model\.layers.*_proj\.weight")
    checkpoint = open_checkpoint(quantised)
    original = open_checkpoint(base)
    change = compare_trunks(checkpoint, original, Progress(disable=True))
    old = all_tensors(base)
    largest = max(float((value - old[key]).norm() / old[key].norm()) for key, value in plain.items())
    assert change.largest_relative_change == pytest.approx(largest, rel=1e-5)
    assert 0 < largest < 0.05
    assert change.share_of_tensors == pytest.approx(len(plain) / (len(old) - len(layout_keys(base))))
    # Its own head is the base's: stale, and found to be so.
    assert document(["inspect", quantised, "--base", base], capfd)["stale"] is True


def layout_keys(path: Path) -> list[str]:
    layout = open_checkpoint(path).layout
    return [key for key in all_tensors(path) if layout.is_head_key(key)]


def test_a_base_of_another_trunk_is_refused_however_it_is_quantised(
    base: Path, finetune: Path, out: Path, capfd: Capture
) -> None:
    pack(finetune, {"quant_method": "awq"})
    assert graft_plan(open_checkpoint(finetune), open_checkpoint(base), "auto").num_modules == 1
    changes: dict[str, Callable[[Tensors], object]] = {
        "norm.weight is [32], in": lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}),
        f"{finetune}: lacks trunk module layers.2.mlp.up_proj, which {base} has": lambda tensors: tensors.pop(
            "model.layers.2.mlp.up_proj.weight"
        ),
    }
    for message, change in changes.items():
        rewrite(finetune, change)
        assert graft(finetune, base, out) == 2
        assert message in capfd.readouterr().err
