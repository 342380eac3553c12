"""Trunks packed by bitsandbytes as they are loaded: what is packed, what is not, and that they train and decode."""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import NUM_DEPTHS, make_documents, one_step, recipe, sequences_of
from torch import nn

from checkpoints import save_stripped, set_fields
from mtp_inference import HeadDrafting, NgramDrafting, SpeculativeDecoder, compare, fault_of
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import CheckpointError, RecipeError
from mtp_train.train.head_training import HeadTraining
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.trunk.quantise import Quantization, require_bitsandbytes, require_quantizable, trunk_bytes
from mtp_train.trunk.states import TrunkStates
from planted_faults import sees_one_later_token
from tiny import ALL_FAMILIES, FAMILY_NAMES, tiny_head, tiny_trunk
from tolerances import assert_same, num_terms

BITS: tuple[Quantization, ...] = ("8bit", "4bit")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: not installed"
)


WIDTH = 64
"""Of tiny trunks: 4 bits take rows in multiples of 32 and columns in multiples of 64."""


def packed(directory: Path, family_name: str, quantization: Quantization | None) -> Trunk:
    if not (directory / "base").exists():
        save_stripped(tiny_trunk(family_name, width=WIDTH), directory / "base")
    return load_trunk(open_checkpoint(directory / "base"), dtype=torch.float32, quantization=quantization)


def products_in(quantization: Quantization) -> torch.dtype:
    """Return the dtype in which this machine multiplies packed weights with fp32 inputs.

    bitsandbytes has a 4-bit kernel for CPUs with AVX512_BF16, which multiplies in bf16.
    """
    from bitsandbytes.functional import has_avx512bf16

    return torch.bfloat16 if quantization == "4bit" and has_avx512bf16() else torch.float32


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("family_name", "quantization"),
    [(name, "4bit") for name in ALL_FAMILIES] + [(name, "8bit") for name in FAMILY_NAMES],
)
def test_linear_layers_are_packed_and_what_is_read_outside_of_its_module_is_not(
    family_name: str, quantization: Quantization, tmp_path: Path
) -> None:
    plain = packed(tmp_path, family_name, None)
    trunk = packed(tmp_path, family_name, quantization)
    dtype = {"8bit": torch.int8, "4bit": torch.uint8}[quantization]
    linear = {name: part for name, part in trunk.causal_lm.named_modules() if isinstance(part, nn.Linear)}
    kept = {
        name.rpartition(".")[-1]
        for name, part in linear.items()
        if part.weight.dtype != dtype and (quantization == "8bit" or is_whole(part) or "lm_head" in name)
    }
    assert all(is_whole(part) for part in linear.values() if part.weight.dtype == torch.uint8)
    # transformers itself keeps what groups and compresses in DeepSeek V4.
    allowed = {"lm_head", "classifier", "weights_proj", *(["kv_b_proj"] * (quantization == "8bit"))}
    allowed |= {"kv_proj", "gate_proj", "o_a_proj"} if family_name == "deepseek_v4" else set()
    assert {"lm_head"} <= kept <= allowed
    assert not any(name.endswith("weights_proj") and part.weight.dtype == dtype for name, part in linear.items())
    assert torch.equal(trunk.lm_head_VD, plain.lm_head_VD)
    tokens_1T = torch.arange(9)[None]
    assert torch.equal(trunk.embed(tokens_1T), plain.embed(tokens_1T))
    assert not any(parameter.requires_grad for parameter in trunk.parameters())
    expected = plain.hidden(tokens_1T)
    if quantization == "4bit":
        # Before the first forward, which packs the weights anew on CPUs with AVX512_BF16.
        use_what_is_packed(plain.causal_lm, linear)
    found = trunk.hidden(tokens_1T)
    assert 0 < (found - expected).norm() / expected.norm() < {"8bit": 0.5, "4bit": 1.5}[quantization]
    if quantization == "4bit" and products_in("4bit") == torch.float32:
        # Else a weight was read past its module, as if it were not packed.
        with pytest.raises(AssertionError):
            assert_same(found, expected, num_terms(plain))
        assert_same(found, plain.hidden(tokens_1T), num_terms(plain))


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", BITS)
def test_texts_of_a_packed_trunk_are_checked_by_its_own_rounding(quantization: Quantization, tmp_path: Path) -> None:
    trunk = packed(tmp_path, "glm4_moe", quantization)
    plain, drafted, faulty = (
        SpeculativeDecoder(trunk, drafting, 3, (), records=True)
        for drafting in (None, NgramDrafting(), NgramDrafting())
    )
    prompts = [[4, 5, 6, 4, 5, row] for row in range(8)]
    texts = plain.generate(prompts, 24)
    assert fault_of(compare(drafted.generate(prompts, 24), texts, trunk)) is None
    with pytest.MonkeyPatch.context() as patch:
        sees_one_later_token(patch)
        assert fault_of(compare(faulty.generate(prompts, 24), texts, trunk)) is not None


def is_whole(part: nn.Linear) -> bool:
    return part.out_features % 32 == 0 and part.in_features % 64 == 0


@needs_bitsandbytes
@pytest.mark.parametrize("family_name", ["qwen3_5_moe", "qwen3_next", "glm4_moe"])
def test_the_kernel_of_other_cpus_takes_every_layer_in_4_bits(
    family_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """bitsandbytes packs the weights anew on a CPU with AVX512_BF16; that part of it runs on every machine."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu
    from bitsandbytes.nn import Linear4bit

    layers = [part for part in packed(tmp_path, family_name, "4bit").modules() if isinstance(part, Linear4bit)]
    assert layers
    for layer in layers:
        _convert_weight_packed_for_cpu(layer.weight.data, copy.deepcopy(layer.weight.quant_state))
    assert re.search(r"\d+ of \d+ linear layers stay unpacked, such as .*: 4 bits take rows in mult", caplog.text)
    # The control: a layer of one row, such as a gate.
    gate = Linear4bit(64, 1, bias=False, quant_type="nf4").to("cpu")
    with pytest.raises(AssertionError):
        _convert_weight_packed_for_cpu(gate.weight.data, gate.weight.quant_state)


def test_a_trunk_of_which_nothing_can_be_packed_is_refused(base: Path) -> None:
    with pytest.raises(CheckpointError, match=r"base: no linear layer that can be packed into 4bit; expected one with"):
        load_trunk(open_checkpoint(base), dtype=torch.float32, quantization="4bit")


def use_what_is_packed(plain: nn.Module, linear: dict[str, nn.Linear]) -> None:
    """Give a model the weights that 4 bits leave."""
    from bitsandbytes.functional import dequantize_4bit

    for name, part in linear.items():
        state: Any = getattr(part.weight, "quant_state", None)
        if state is not None:
            plain.get_submodule(name).weight.data = dequantize_4bit(part.weight.data, state)


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_drafts_change_nothing_that_a_packed_trunk_says(
    family_name: str, quantization: Quantization, tmp_path: Path
) -> None:
    trunk = packed(tmp_path, family_name, quantization)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    plain = SpeculativeDecoder(trunk, None, 0, frozenset()).generate(prompts, 16)
    drafted = SpeculativeDecoder(trunk, HeadDrafting(tiny_head(trunk)), NUM_DEPTHS, frozenset()).generate(prompts, 16)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


@needs_bitsandbytes
@pytest.mark.parametrize(("threshold", "depends"), [(0.0, False), (6.0, True)])
def test_a_token_in_8_bits_does_not_depend_on_its_neighbours(threshold: float, depends: bool, tmp_path: Path) -> None:
    """The library's own default, 6, is the control: an outlier beside a token changes what is computed of it."""
    linear = packed(tmp_path, "glm4_moe", "8bit").layers[0].self_attn.q_proj
    assert linear.state.threshold == 0.0
    linear.state.threshold = threshold
    input_ND = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    beside_ND = torch.cat([input_ND, 30 * input_ND])
    with torch.no_grad():
        assert torch.equal(linear(input_ND), linear(beside_ND)[:4]) is not depends


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_packing_documents_changes_no_gradient(
    quantization: Quantization, precision: torch.dtype, tmp_path: Path
) -> None:
    """A head trains on such a trunk, whose weights stay; documents do not leak into one another."""
    trunk = packed(tmp_path, "qwen3_5", quantization)
    # The first forward packs 4-bit weights anew on CPUs with AVX512_BF16.
    trunk.hidden(torch.arange(9)[None])
    before = {name: value.clone() for name, value in trunk.named_parameters()}
    documents = make_documents(16, 9, 7)
    found = []
    for sequences, count in ((sequences_of(documents, pack=True), 2), (sequences_of(documents, pack=False), 3)):
        assert len(sequences) == count
        module = HeadTraining(
            TrunkStates(trunk),
            tiny_head(trunk),
            num_depths=NUM_DEPTHS,
            kind="kl",
            temperature=1.0,
            compute_dtype=precision,
        )
        used = recipe(train__tokens_per_step=count * 16, train__micro_batch_sequences=count)
        found.append(one_step(module, sequences, used)[0])
    assert all(torch.equal(value, before[name]) for name, value in trunk.named_parameters())
    rough = 0.1 if torch.bfloat16 in (precision, products_in(quantization)) else 1e-3
    scale = max(float(value.abs().max()) for value in found[1].values())
    torch.testing.assert_close(*found, atol=rough * scale, rtol=0)


def test_a_checkpoint_that_is_quantised_already_is_refused(base: Path) -> None:
    require_quantizable("8bit", open_checkpoint(base))
    set_fields(base, {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(CheckpointError, match=r"quantised with fp8 already, while model\.quantization is 8bit"):
        require_quantizable("8bit", open_checkpoint(base))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"model\.quantization: 4bit, but .* Run 'pip install bitsandbytes'"):
        require_bitsandbytes("4bit")


@needs_bitsandbytes
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@pytest.mark.parametrize("quantization", [None, *BITS])
def test_bytes_are_counted_as_they_are_held(
    family_name: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    trunk = packed(tmp_path, family_name, quantization)
    held = sum(value.nbytes for value in trunk.parameters())
    for part in trunk.modules():
        scales = getattr(part.weight, "SCB", None) if quantization == "8bit" and isinstance(part, nn.Linear) else None
        held += 0 if scales is None else scales.nbytes
        state = getattr(part.weight, "quant_state", None) if isinstance(part, nn.Linear) else None
        held += 0 if state is None else state.absmax.nbytes
    assert trunk_bytes(tiny_trunk(family_name, width=WIDTH).causal_lm, quantization, 4) == held
