"""Trunks that a quantisation method packed: grafted, exported and decoded, and refused where no method is declared."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_head_difference import SINGLE_NAMES as LAYERS
from test_packed_heads import METHODS, Pack, int4, nf4, pack_projections
from test_quantised import FP8 as IN_BLOCKS, head_layers, quantisation, quantise
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from checkpoints import Tensors, all_tensors, base_and_finetune, save_tensors, set_fields
from mtp_train.checkpoints.files import SINGLE_FILE, JsonObject, open_checkpoint
from mtp_train.checkpoints.quantised import packed_keys, unlisted_layers
from mtp_train.cli.main import main
from mtp_train.errors import CheckpointError
from mtp_train.trunk.load import load_trunk
from runs import Capture, document, paste, tree
from tiny import ALL_FAMILIES, FAMILY_NAMES

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: not installed"
)
FP8 = torch.float8_e4m3fn


def nested_fp4(module: str, shape: tuple[int, ...]) -> Tensors:
    found = {key.replace("nf4", "fp4"): value for key, value in nf4(module, shape).items()}
    nested = {f"{module}.weight.nested_{name}": torch.ones(4) for name in ("absmax", "quant_map")}
    return {**found, **nested, f"{module}.weight.absmax": torch.ones(8, dtype=torch.uint8)}


def int8(module: str, shape: tuple[int, ...]) -> Tensors:
    return {
        f"{module}.weight": torch.ones(shape, dtype=torch.int8),
        f"{module}.SCB": torch.ones(shape[0]),
        f"{module}.weight_format": torch.zeros((), dtype=torch.uint8),
    }


def channels(module: str, shape: tuple[int, ...]) -> Tensors:
    # With the scales of a KV cache, which are the attention's.
    cache = {f"{module.rpartition('.')[0]}.{name}_scale": torch.ones(1) for name in "kv"} if "attn" in module else {}
    return {f"{module}.weight": torch.ones(shape).to(FP8), f"{module}.weight_scale": torch.ones(shape[0], 1), **cache}


def static_fp8(module: str, shape: tuple[int, ...]) -> Tensors:
    scales = ("weight_scale", "input_scale", *(["k_scale"] if "k_proj" in module else []))
    return {f"{module}.weight": torch.ones(shape).to(FP8), **{f"{module}.{name}": torch.ones(()) for name in scales}}


def activation_aware(module: str, shape: tuple[int, ...]) -> Tensors:
    beside = {f"{module.rpartition('.')[0]}.act_fn.scales": torch.ones(4)} if module.endswith("down_proj") else {}
    return {**int4(module, shape), **beside}


def half_quadratic(module: str, shape: tuple[int, ...]) -> Tensors:
    beside = {f"{module}.{name}": torch.ones(4) for name in ("scale", "zero", "nbits")}
    return {f"{module}.W_q": torch.ones(shape[0] // 2, shape[1], dtype=torch.uint8), **beside}


FORMS: dict[str, tuple[Pack, JsonObject]] = {
    **METHODS,
    "fp4, as bitsandbytes first declared it": (nested_fp4, {"load_in_4bit": True, "load_in_8bit": False}),
    "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "channels": (channels, {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}),
    "awq": (activation_aware, {"quant_method": "awq", "bits": 4}),
    "modelopt fp8": (static_fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "hqq": (half_quadratic, {"quant_method": "hqq"}),
}


def pack_trunk(path: Path, form: str, *, declared: bool = True) -> Path:
    """Store the projections of a trunk's blocks as a method stores them."""
    pack, settings = FORMS[form]
    layout = open_checkpoint(path).layout
    pack_projections(path, lambda key: not layout.is_head_key(key), pack, settings if declared else None)
    return path


@pytest.mark.parametrize("form", [form for form in FORMS if form != "hqq"])
def test_a_packed_fine_tune_is_the_trunk_of_its_base(
    form: str, base: Path, finetune: Path, out: Path, capfd: Capture
) -> None:
    before = tree(pack_trunk(finetune, form))
    found = document(["inspect", finetune, "--base", base], capfd)
    assert found["status"] == "declared_but_missing"
    # Codes are not compared with weights: what is left is equal.
    assert found["trunk_changed"]["largest_relative_change"] < 1
    grafted = paste(found["cure"])
    assert document(["inspect", grafted], capfd)["status"] == "healthy"
    document(["export", grafted, "--out", out], capfd)
    exported = document(["inspect", out], capfd)
    assert exported["serves"]["vllm"].startswith("vllm serve")
    written = all_tensors(out)
    plain = ((key, value) for key, value in all_tensors(finetune).items() if value.dtype != FP8)
    assert all(written[key].numpy(force=True).tobytes() == value.numpy(force=True).tobytes() for key, value in plain)
    assert tree(finetune) == before


def test_tensors_beside_a_weight_with_another_name_are_no_modules(base: Path, finetune: Path, capfd: Capture) -> None:
    pack_trunk(finetune, "hqq")
    assert document(["inspect", finetune, "--base", base], capfd)["status"] == "declared_but_missing"


@needs_bitsandbytes
@pytest.mark.parametrize(
    "settings",
    [{"load_in_8bit": True}, *({"load_in_4bit": True, "bnb_4bit_quant_type": kind} for kind in ("nf4", "fp4"))],
    ids=["int8", "nf4", "fp4"],
)
def test_what_bitsandbytes_saved_is_grafted_and_decoded(
    settings: JsonObject, base: Path, finetune: Path, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    """Some of its layers have 4 rows, which the 4-bit kernel of some CPUs does not take."""
    packing = BitsAndBytesConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(finetune, quantization_config=packing, device_map="cpu")
    model.save_pretrained(tmp_path / "saved")
    document(["graft", tmp_path / "saved", "--from", base, "--out", out], capfd)
    # A list takes the place of transformers' own, which names the output matrix.
    assert "lm_head" in quantisation(out)["llm_int8_skip_modules"]
    trunk = load_trunk(open_checkpoint(out), dtype=torch.float32)
    assert torch.equal(trunk.lm_head_VD, model.lm_head.weight)
    for part in model.modules():
        part.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        expected = model(torch.arange(9)[None]).logits
    torch.testing.assert_close(trunk.project(trunk.hidden(torch.arange(9)[None])), expected, rtol=1e-5, atol=1e-5)


# Packed weights without a declared method


UNDECLARED: dict[str, Callable[[Path], object]] = {
    **{form: (lambda path, form=form: pack_trunk(path, form, declared=False)) for form in FORMS},
    "fp8 in blocks": lambda path: (
        quantise(path, r"^model\..*_proj\.weight"),
        set_fields(path, {"quantization_config": None}),
    ),
    "codes cast to floats": lambda path: add(path, "model.layers.0.mlp.up_proj.weight_scale_inv"),
    "a head in fp8": lambda path: (
        quantise(path, r"^mtp\..*_proj\.weight"),
        set_fields(path, {"quantization_config": None}),
    ),
}


def add(path: Path, key: str) -> None:
    save_tensors({**all_tensors(path), key: torch.ones(1, 1)}, path / SINGLE_FILE)


@pytest.mark.parametrize("case", UNDECLARED)
def test_a_packed_weight_without_a_method_is_refused_wherever_it_is_read(
    case: str, base: Path, finetune: Path, tmp_path: Path, capfd: Capture
) -> None:
    path = Path(shutil.copytree(base, tmp_path / "packed"))
    UNDECLARED[case](path)
    found = document(["inspect", path], capfd)
    assert (found["status"], "declares no method" in found["problems"][0]) == ("damaged", True)
    assert all(text.startswith("no: ") for text in found["serves"].values())
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}\n')
    data = [f"data.sources=[{{path: {tmp_path}/chats.jsonl}}]", "data.group_field=null", f"run_dir={tmp_path}/run"]
    for command in (
        ["generate", str(path), "--prompt", "a"],
        ["graft", str(path), "--from", str(base), *out],
        ["graft", str(finetune), "--from", str(path), *out],
        ["inspect", str(finetune), "--base", str(path)],
        ["export", str(path), *out],
        ["check", "retrain_head", f"model.trunk={path}", f"model.head_from={base}", *data],
    ):
        assert main(command) == 2, command
        assert "config.json has no quantization_config; expected the method" in capfd.readouterr().err, command
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family_name", ALL_FAMILIES)
def test_no_plain_checkpoint_shows_packed_weights(family_name: str, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    assert packed_keys(open_checkpoint(base).tensors) == []


@pytest.mark.parametrize(
    "declare",
    [
        lambda path: (path / "hf_quant_config.json").write_text("{}"),
        lambda path: set_fields(path, {"compression_config": {"quant_method": "compressed-tensors"}}),
    ],
    ids=["modelopt's file", "the old field"],
)
def test_a_method_is_declared_where_engines_look_for_it(declare: Any, base: Path, capfd: Capture) -> None:
    declare(pack_trunk(base, "channels", declared=False))
    assert document(["inspect", base], capfd)["status"] == "healthy"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("modelopt fp8", "is packed with modelopt, which transformers does not read"),
        ("awq", "transformers cannot load weights packed with awq"),
    ],
)
def test_a_trunk_that_transformers_cannot_read_is_not_decoded(form: str, message: str, base: Path) -> None:
    if form == "awq" and importlib.util.find_spec("gptqmodel") is not None:
        pytest.skip("gptqmodel reads it")
    pack_trunk(base, form)
    with pytest.raises(CheckpointError, match=message):
        load_trunk(open_checkpoint(base), dtype=torch.float32)


# A head in plain floats that the exceptions lack


def any_regex(patterns: list[str], module: str) -> bool:
    return any(re.match(pattern, module) for pattern in patterns)


def is_dynamic(found: JsonObject, module: str) -> bool:
    return any_regex([key[2:] for key in found["dynamic"] if key.startswith("-:")], module)


LISTS: dict[str, tuple[JsonObject, Any]] = {
    "fp8": (
        {**IN_BLOCKS, "modules_to_not_convert": ["lm_head"]},
        lambda found, module: module in found["modules_to_not_convert"],
    ),
    "ignored_layers": (
        {**IN_BLOCKS, "ignored_layers": ["lm_head"]},
        lambda found, module: module in found["ignored_layers"],
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": None},
        lambda found, module: any(entry in module for entry in found["modules_to_not_convert"]),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*attn.*": {}}},
        is_dynamic,
    ),
    "gptq without": ({"quant_method": "gptq", "bits": 4}, is_dynamic),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:visual.*"]},
        lambda found, module: any_regex([entry[3:] for entry in found["ignore"] if entry.startswith("re:")], module),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda found, module: any_regex([entry.replace("*", ".*") for entry in found["ignore"]], module),
    ),
}
"""The settings of each method, and whether its exceptions cover a module."""


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize(("settings", "covers"), LISTS.values(), ids=LISTS.keys())
def test_a_head_that_no_exception_covers_is_named_and_export_lists_it(
    settings: JsonObject, covers: Any, family_name: str, tmp_path: Path, capfd: Capture
) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    pack_trunk(base, "awq")
    before_lists = {**settings, "dynamic": {"-:.*lm_head.*": {}}} if "dynamic" in settings else settings
    set_fields(base, {"quantization_config": before_lists})
    before = tree(base)
    found = document(["inspect", base], capfd)
    reasons = {found["serves"][engine] for engine in ("vllm", "sglang") if "no: reads" in found["serves"][engine]}
    assert len(reasons) == 1
    assert "of the head as quantised: quantization_config lists no exception" in reasons.pop()
    out = paste(found["cure"])
    assert found["cure"].startswith("mtp-train export")
    listed = quantisation(out)
    layers = head_layers(out)
    assert len(layers) > 5
    assert all(covers(listed, module) for module in layers)
    # The trunk stays quantised, and the other settings stay the same.
    assert not covers(listed, "model.layers.0.mlp.down_proj")
    for name, value in before_lists.items():
        assert listed[name] == value or set(value or ()) < set(listed[name])
    again = document(["inspect", out], capfd)
    assert (again["cure"], unlisted_layers(open_checkpoint(out))) == (None, [])
    assert tree(base) == before
    # Nothing is left to list.
    document(["export", out, "--out", tmp_path / "again"], capfd)
    assert (tmp_path / "again" / "config.json").read_bytes() == (out / "config.json").read_bytes()


FUSED = [
    f"mtp.layers.0.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "modules_to_not_convert": LAYERS},
        {"quant_method": "fp8", "ignored_layers": ["mtp"]},
        {"quant_method": "fp8", "modules_to_not_convert": FUSED},
        {"quant_method": "awq", "modules_to_not_convert": ["mtp.lay"]},
        {"quant_method": "gptq", "dynamic": {"-:^mtp\\.": {}}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["mtp"]},
        {"quant_method": "compressed-tensors", "ignore": ["re:^mtp.*"]},
        {"quant_method": "compressed-tensors", "ignore": [], "config_groups": {"a": {"targets": ["re:model\\..*"]}}},
        {"quant_method": "quark", "exclude": LAYERS},
        {"quant_method": "modelopt", "ignore": ["mtp.layers.0*"]},
        {"quant_method": "modelopt", "exclude_modules": ["mtp.layers*"]},
        {"quant_method": "modelopt_mixed", "quantized_layers": {"model.layers.0.mlp.up_proj": {}}},
        {"quant_method": "hqq"},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_no_layer_is_named_that_an_exception_covers(settings: JsonObject, base: Path) -> None:
    pack_trunk(base, "awq")
    set_fields(base, {"quantization_config": settings})
    checkpoint = open_checkpoint(base)
    assert unlisted_layers(checkpoint) == []


def test_layers_that_the_trunk_keeps_in_floats_are_not_named(base: Path) -> None:
    """Releases in FP8 have a projection and routers in plain floats, and list none of them."""
    quantise(base, r"layers\..*_proj\.weight")
    checkpoint = open_checkpoint(base)
    assert unlisted_layers(checkpoint) == []


def test_the_packed_layers_of_a_head_get_no_exception(base: Path, out: Path, capfd: Capture) -> None:
    quantise(base, r"^model\.layers.*_proj\.weight|^mtp\.layers\.0\.self_attn.*_proj\.weight")
    document(["export", base, "--out", out], capfd)
    listed = quantisation(out)["modules_to_not_convert"]
    assert sorted(listed) == ["lm_head", *sorted(layer for layer in LAYERS if "mlp" in layer)]
