"""Rounds run linear layers and norms by faster forwards: the same text, never the weights of before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtp_inference import SpeculativeDecoder, cpu_layers
from mtp_inference.cpu_layers import CpuLayers, FastLinear, is_plain
from mtp_inference.cpu_norms import (
    FORMULAS,
    GATED_FORMULAS,
    NormFormula,
    brief_forward,
    brief_norm,
    norm_formula,
    rms_norm_in_torch,
)
from mtp_train.trunk.precision import bf16_support
from tiny import CACHE_KINDS, tiny_head, tiny_trunk
from tolerances import rounding

PROMPTS = [[5, 9, 2, 11, 3], [7, 1, 8, 4, 2, 6]]
DEPTH = 3


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Linear]]:
    """The layers in the order in which they were packed; tiny ones are packed too."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("packs on x86 CPUs")
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS", 1)
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS_BY_COLUMNS", 1)
    run_on_amd(monkeypatch, False)
    packed: list[nn.Linear] = []

    class Noted(cpu_layers.Pack):
        def __init__(self, layer: nn.Linear) -> None:
            packed.append(layer)
            super().__init__(layer)

    monkeypatch.setattr(cpu_layers, "Pack", Noted)
    yield packed
    cpu_layers._packs.clear()


def run_on_amd(monkeypatch: pytest.MonkeyPatch, is_amd: bool) -> None:
    """Choose products as on AMD's CPUs, where one or two rows are multiplied as columns or padded, or as on others."""
    # Only the choice is set: every x86 CPU runs each product for real.
    monkeypatch.setattr(cpu_layers, "runs_on_amd", lambda: is_amd)


def decode(decoder: SpeculativeDecoder) -> list[list[int]]:
    return [list(one.token_ids) for one in decoder.decode(PROMPTS, 12)]


@pytest.mark.parametrize("is_amd", [False, True])
def test_a_round_packs_what_it_multiplies_once_and_leaves_the_model_as_it_was(
    is_amd: bool, packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_amd(monkeypatch, is_amd)
    trunk = tiny_trunk("qwen3_5")
    before = {name: dict(module.__dict__) for name, module in trunk.causal_lm.named_modules()}
    decoder = SpeculativeDecoder(trunk, tiny_head(trunk), DEPTH, eos_ids=())
    texts = decode(decoder)
    assert len(packs) == len(set(packs)) > 8
    assert {name: dict(module.__dict__) for name, module in trunk.causal_lm.named_modules()} == before
    again = SpeculativeDecoder(trunk, decoder.drafting, DEPTH, eos_ids=())
    count = len(packs)
    assert decode(again) == texts
    assert len(packs) == count
    plain = SpeculativeDecoder(tiny_trunk("qwen3_5"), None, 0, eos_ids=(), max_batch=1)
    assert decode(plain) == texts


@pytest.mark.parametrize("how", ["in place", "through data", "another tensor"])
def test_a_changed_weight_is_packed_again(packs: list[nn.Linear], how: str) -> None:
    layer = nn.Linear(8, 6)
    layers = CpuLayers([layer])
    input_BTD = torch.randn(1, 4, 8)

    def product() -> torch.Tensor:
        layers.refresh()
        with torch.inference_mode(), layers.used():
            return layer(input_BTD)

    old = product()
    torch.testing.assert_close(old, layer(input_BTD).detach(), atol=rounding(old, 8), rtol=0)
    assert len(packs) == 1
    with torch.no_grad():
        if how == "in place":
            layer.weight[2, 3] += 1
        elif how == "through data":
            layer.weight.data += 1
        else:
            layer.weight.data = layer.weight.data + 1
    expected_BTD = layer(input_BTD).detach()
    torch.testing.assert_close(product(), expected_BTD, atol=rounding(expected_BTD, 8), rtol=0)
    assert not torch.allclose(expected_BTD, old, atol=0.1)
    assert len(packs) == 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 8), (1, 2, 8), (8,), (1, 5, 8), (3, 1, 8)])
@pytest.mark.parametrize("is_amd", [False, True])
def test_any_number_of_rows_is_multiplied(
    is_amd: bool, shape: tuple[int, ...], bias: bool, packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_amd(monkeypatch, is_amd)
    layer = nn.Linear(8, 6, bias=bias)
    # Not contiguous, as the last rows of a longer input are.
    input_BTD = torch.randn(*shape[:-1], 16)[..., 8:]
    with torch.inference_mode(), CpuLayers([layer]).used():
        found_BTD = layer(input_BTD)
    expected_BTD = layer(input_BTD).detach()
    torch.testing.assert_close(found_BTD, expected_BTD, atol=rounding(expected_BTD, 8), rtol=0)
    assert found_BTD.is_contiguous()
    assert packs == ([] if is_amd and input_BTD[..., 0].numel() <= 2 else [layer])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_few_rows_of_a_packed_product_are_padded(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 6)
    multiplied: list[int] = []
    packed_product = cpu_layers._packed_product

    def noted(input: torch.Tensor, *packed: Any) -> torch.Tensor:
        multiplied.append(input.shape[:-1].numel())
        return packed_product(input, *packed)

    monkeypatch.setattr(cpu_layers, "_packed_product", noted)
    product = FastLinear(layer, packs=True, by_columns=False, pads=True)
    input_BTD = torch.randn(1, num_rows, 16)[..., 8:]
    with torch.inference_mode():
        found_BTD = product(input_BTD)
    expected_BTD = layer(input_BTD).detach()
    torch.testing.assert_close(found_BTD, expected_BTD, atol=rounding(expected_BTD, 8), rtol=0)
    assert found_BTD.is_contiguous()
    # Three rows are as fast as four.
    assert multiplied == [3 if num_rows == 3 else 4]


@pytest.mark.skipif(not bf16_support(torch.device("cpu"))[0], reason="the CPU multiplies bf16 slowly")
@pytest.mark.parametrize("is_amd", [False, True])
def test_bf16_is_packed_and_never_multiplied_by_columns(
    is_amd: bool, packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_amd(monkeypatch, is_amd)
    layer = nn.Linear(64, 48).bfloat16()
    for num_rows in (1, 2, 5):
        input_BTD = torch.randn(1, num_rows, 64).bfloat16()
        with torch.inference_mode(), CpuLayers([layer]).used():
            found_BTD = layer(input_BTD)
        expected_BTD = layer(input_BTD).detach()
        torch.testing.assert_close(found_BTD, expected_BTD, atol=rounding(expected_BTD, 64), rtol=0)
    assert packs == [layer]


def test_a_matrix_too_small_to_pack_is_multiplied_by_columns_only(
    packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_amd(monkeypatch, True)
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS", 49)
    small, large = nn.Linear(8, 6), nn.Linear(8, 7)
    layers = CpuLayers([small, large])
    assert list(layers.products) == [small, large]
    input_BTD = torch.randn(1, 5, 8)
    with torch.inference_mode(), layers.used():
        found_BTD = small(input_BTD)
        large(input_BTD)
    assert torch.equal(found_BTD, small(input_BTD))
    assert packs == [large]
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS_BY_COLUMNS", 49)
    assert list(CpuLayers([small, large]).products) == [large]


@pytest.mark.parametrize(
    ("capability", "has_room", "columns"),
    # Layers by the width of their input: only a wide one is faster as columns where it cannot be padded.
    [("AVX512", True, {512}), ("AVX2", True, {512, 1024}), ("AVX512", False, {512, 1024})],
)
def test_columns_give_way_to_padded_rows(
    capability: str, has_room: bool, columns: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_amd(monkeypatch, True)
    # Only the choice is tested: nothing is multiplied.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(cpu_layers, "main_memory_bytes", lambda: 2**40 if has_room else 0)
    monkeypatch.setattr(cpu_layers, "COLUMNS_NUMBERS", 1)
    layers = [nn.Linear(width, 8) for width in (512, 1024, 2048)]
    products = CpuLayers(layers).products
    found = {layer.in_features for layer, product in products.items() if product.by_columns}
    assert found == columns
    assert {layer for layer, product in products.items() if product.packs} == (set(layers) if has_room else set())


def test_an_interrupted_round_restores_the_layers() -> None:
    layer = nn.Linear(8, 6)

    def interrupted() -> None:
        with CpuLayers([layer]).used():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "forward" not in layer.__dict__


def test_only_plain_layers_are_packed_and_only_where_the_copies_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        """A layer with a product of its own."""

    hooked = nn.Linear(8, 6)
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    assert is_plain(nn.Linear(8, 6))
    assert not any(map(is_plain, (Other(8, 6), nn.Linear(8, 6).half(), hooked, nn.Embedding(8, 6))))
    for native in (False, True):
        monkeypatch.setattr(cpu_layers, "bf16_support", lambda device, native=native: (native, "set here"))
        assert is_plain(nn.Linear(8, 6).bfloat16()) == native
    layer = nn.Linear(100, 100, bias=False)
    # 40,000 bytes of weights and as many of copies, in 60 % of the memory.
    for memory, packed in ((140_000, [layer]), (130_000, [])):
        monkeypatch.setattr(cpu_layers, "main_memory_bytes", lambda memory=memory: memory)
        assert list(CpuLayers([layer]).products) == packed
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS", 10_001)
    assert not CpuLayers([layer]).products


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_brief_norm_rounds_like_the_module(kind: str, dtype: torch.dtype) -> None:
    model = tiny_trunk(CACHE_KINDS[kind]).causal_lm.to(dtype)
    briefs = {module: brief_norm(module) for module in model.modules()}
    norms = {module: brief for module, brief in briefs.items() if brief is not None}
    assert norms
    for module, brief in norms.items():
        (weight_D,) = module.parameters()
        torch.nn.init.normal_(weight_D)
        inputs = [torch.randn(2, 3, len(weight_D)).to(dtype)] * (2 if type(module).__name__.endswith("Gated") else 1)
        expected = module(*inputs)
        found = brief(*inputs)
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, atol=0.0, rtol=3e-7 if dtype is torch.float32 else 0.0)


@pytest.mark.parametrize("formula", [*FORMULAS, *GATED_FORMULAS])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_brief_norm_has_the_bits_of_its_formula(
    formula: NormFormula, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, weight_D = torch.randn(4, 48).to(dtypes[0]), torch.randn(48).to(dtypes[1])
    gate = torch.randn_like(x) if formula.activation else None
    found = brief_forward({"weight": weight_D}, 1e-6, formula, x, gate)
    expected = rms_norm_in_torch(x, weight_D, gate, 1e-6, formula)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    # Every other formula has other bits.
    for other in {*FORMULAS, *GATED_FORMULAS} - {formula}:
        if bool(other.activation) == bool(formula.activation) and dtypes[0] is dtypes[1]:
            assert not torch.equal(found, rms_norm_in_torch(x, weight_D, gate, 1e-6, other))


@pytest.mark.parametrize(
    ("name", "path", "formula"),
    [
        ("qwen3_5", "layers.0.input_layernorm", NormFormula(1.0, False, "")),
        ("qwen3_5", "layers.0.linear_attn.norm", NormFormula(0.0, True, "silu")),
        ("glm4_moe", "norm", NormFormula(0.0, True, "")),
        ("gpt_oss", "norm", NormFormula(0.0, False, "")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_formula_is_found(name: str, path: str, formula: NormFormula, dtype: torch.dtype) -> None:
    module = tiny_trunk(name).decoder.get_submodule(path).to(dtype)
    with torch.no_grad():
        # Weights of 1 would hide how products are rounded.
        module.weight.fill_(1.0)
    assert norm_formula(module) == formula


def test_a_norms_hooks_are_neither_run_nor_copied() -> None:
    norm = tiny_trunk("qwen3_5").decoder.norm
    before = norm.weight.clone()

    class Uncopied:
        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("copied")

        def run(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise AssertionError("ran")

    norm.register_forward_pre_hook(Uncopied().run)
    assert norm_formula(norm) == NormFormula(1.0, False, "")
    assert torch.equal(norm.weight, before)


class ForeignRMSNormGated(nn.Module):
    """A norm of a package whose kernels do not run on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        raise ValueError("Pointer argument cannot be accessed from Triton")


class GroupedRMSNorm(nn.Module):
    """A norm over halves: its parts are those of an RMSNorm, its formula is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        halves = x.unflatten(-1, (2, -1))
        return self.weight * (halves * torch.rsqrt(halves.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)


def test_other_formulas_keep_their_own_forward() -> None:
    assert brief_norm(GroupedRMSNorm()) is None
    assert brief_norm(ForeignRMSNormGated()) is None
    assert brief_norm(nn.LayerNorm(8)) is None
    norm = tiny_trunk("glm4_moe").decoder.norm
    assert brief_norm(norm) is not None
    # As a weight is that is sharded over processes.
    norm.weight = nn.Parameter(torch.empty(0))
    assert brief_norm(norm) is None
