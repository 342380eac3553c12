"""Products run in the precision that was resolved, whatever dtype weights are held in."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_train import check
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.data.pack import PackedBatch
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.trunk.load import load_trunk
from mtp_train.trunk.precision import held_dtype, resolve_precision, slow_halves
from mtp_train.trunk.states import TrunkStates
from products import Products
from runs import tiny_recipe, write_inputs
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk

CPU = torch.device("cpu")
TOKENS_BT = torch.tensor([[5, 9, 2, 11, 3, 7, 1, 8]])
NUM_DEPTHS = 2


def x86(
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    *,
    avx512_bf16: bool = False,
    amx: bool = False,
    mkldnn: bool,
    name: str = "AMD EPYC",
) -> None:
    # Only the choice is tested: nothing is multiplied. test_held_in_half.py runs both choices for real.
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)


@pytest.mark.parametrize(
    ("capability", "features", "expected"),
    [
        ("AVX512", {"avx512_bf16": True, "mkldnn": True}, "bf16"),
        ("AVX512", {"amx": True, "mkldnn": True}, "bf16"),
        ("AVX512", {"amx": True, "avx512_bf16": True, "mkldnn": True, "name": "Intel Xeon"}, "bf16"),
        # Native, and slower than fp32.
        ("AVX512", {"avx512_bf16": True, "mkldnn": True, "name": "Intel Xeon"}, "fp32"),
        # oneDNN emulates bf16 on any AVX-512, and reports it as supported.
        ("AVX512", {"mkldnn": True}, "fp32"),
        ("AVX2", {"mkldnn": False}, "fp32"),
        # Held back by ATEN_CPU_CAPABILITY, and by ONEDNN_MAX_CPU_ISA: torch's queries look at the processor.
        ("AVX2", {"avx512_bf16": True, "amx": True, "mkldnn": True}, "fp32"),
        ("AVX512", {"avx512_bf16": True, "amx": True, "mkldnn": False}, "fp32"),
    ],
)
def test_auto_is_bf16_on_x86_only_where_it_is_native_and_faster(
    monkeypatch: pytest.MonkeyPatch, capability: str, features: dict[str, Any], expected: str
) -> None:
    x86(monkeypatch, capability, **features)
    assert resolve_precision("auto", CPU).precision == expected
    assert slow_halves(torch.bfloat16, CPU) is (expected == "fp32")
    assert slow_halves(torch.float16, CPU) is (expected == "fp32")
    assert not slow_halves(torch.float32, CPU)


@pytest.mark.parametrize(
    ("has_mkldnn", "supported", "expected"), [(True, True, "bf16"), (True, False, "fp32"), (False, True, "fp32")]
)
def test_auto_asks_onednn_on_arm_and_apple(
    monkeypatch: pytest.MonkeyPatch, has_mkldnn: bool, supported: bool, expected: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_mkldnn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert resolve_precision("auto", CPU).precision == expected


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bf16_on_accelerators_that_have_it(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda _major, _minor: native)
    expected = "bf16" if native else "fp32"
    assert resolve_precision("auto", torch.device("cuda")).precision == expected
    assert resolve_precision("auto", torch.device("mps")).precision == expected
    # Accelerators that lack it store it all the same: nothing is converted there.
    assert not slow_halves(torch.bfloat16, torch.device("cuda"))


def test_a_precision_that_is_named_is_obeyed_and_its_cost_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x86(monkeypatch, "AVX2", mkldnn=False)
    asked = resolve_precision("bf16", CPU)
    assert asked.precision == "bf16"
    assert "no native bf16" in asked.reason
    assert "5 times" in asked.reason
    assert resolve_precision("fp32", CPU) == ("fp32", "this CPU (AVX2) has no native bf16")
    x86(monkeypatch, "AVX512", avx512_bf16=True, mkldnn=True)
    assert resolve_precision("bf16", CPU) == ("bf16", "this CPU (AVX512) multiplies bf16 natively")


def test_a_trunk_is_held_in_fp32_on_a_cpu_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_train.trunk.precision.main_memory_bytes", lambda: 1000)
    assert held_dtype("auto", torch.bfloat16, 150, CPU) is torch.float32
    assert held_dtype("auto", torch.bfloat16, 151, CPU) is torch.bfloat16
    assert held_dtype("auto", torch.float16, 151, CPU) is torch.float16
    assert held_dtype("auto", torch.bfloat16, 1, torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@torch.no_grad()
def test_weights_are_put_back_where_a_layer_raises(error: type[BaseException]) -> None:
    half = tiny_trunk("qwen3_5").to(torch.bfloat16)

    def stop(*_unused: Any) -> None:
        raise error

    half.layers[1].mlp.register_forward_hook(stop)
    with pytest.raises(error), half.computing_in(torch.float32):
        half.hidden(TOKENS_BT)
    assert {value.dtype for value in half.parameters()} == {torch.bfloat16}


def one_step(name: str, held: torch.dtype, computed: torch.dtype) -> tuple[set[torch.dtype], Tensor, Tensor]:
    """Return the dtypes of all products of a step, its loss, and a gradient."""
    # fp32 weights with the values that bf16 has: what differs is the products alone.
    trunk = tiny_trunk(name).to(torch.bfloat16).to(held)
    module = HeadTraining(
        TrunkStates(trunk),
        tiny_head(trunk).float(),
        num_depths=NUM_DEPTHS,
        kind="kl",
        temperature=1.0,
        compute_dtype=computed,
    ).train()
    zeros_BT = torch.zeros_like(TOKENS_BT)
    positions_BT = torch.arange(TOKENS_BT.shape[1])[None]
    batch = PackedBatch(TOKENS_BT, positions_BT, zeros_BT, zeros_BT == 0)
    with Products() as products:
        terms = module(MicroBatch(batch, torch.ones(NUM_DEPTHS)))
        terms.total.backward()
    gradient = next(value.grad for value in module.head.parameters() if value.grad is not None)
    assert gradient.dtype is torch.float32
    return products.dtypes, terms.sum_K, gradient


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_every_product_of_a_step_is_in_the_compute_dtype(name: str, held: torch.dtype, computed: torch.dtype) -> None:
    dtypes, _, _ = one_step(name, held, computed)
    with Products() as of_trunk, torch.no_grad():
        tiny_trunk(name).to(computed).hidden(TOKENS_BT)
    # Some routers multiply in fp32 by themselves.
    assert computed in dtypes
    assert dtypes <= {computed} | of_trunk.dtypes


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_step_depends_on_the_compute_dtype_and_little_on_the_held_one(name: str) -> None:
    _, exact_K, exact = one_step(name, torch.float32, torch.float32)
    _, widened_K, widened_gradient = one_step(name, torch.bfloat16, torch.float32)
    torch.testing.assert_close(widened_K, exact_K, rtol=0, atol=0)
    torch.testing.assert_close(widened_gradient, exact, rtol=0, atol=0)
    for held in (torch.float32, torch.bfloat16):
        _, rounded_K, _ = one_step(name, held, torch.bfloat16)
        assert not torch.equal(rounded_K, exact_K)
        # A product of bf16 numbers is off by 2^-8 at most; a handful of them follow one another here.
        torch.testing.assert_close(rounded_K, exact_K, rtol=8 * 2**-8, atol=0)


def test_the_head_s_weights_move_where_an_output_matrix_is_converted() -> None:
    """Negative control of the test above: the loss alone multiplies in the dtype of its inputs."""
    from mtp_train.losses.chunked import frozen_head_loss

    found: list[set[torch.dtype]] = []
    for compute_dtype in (None, torch.bfloat16):
        with Products() as products:
            frozen_head_loss(
                torch.randn(1, 4, 8, requires_grad=True),
                torch.randn(4, 8),
                torch.randn(16, 8),
                torch.zeros(4, dtype=torch.long),
                torch.ones(1, 4),
                kind="kl",
                compute_dtype=compute_dtype,
            ).total.backward()
        found.append(products.dtypes)
    assert found == [{torch.float32}, {torch.bfloat16}]


@pytest.mark.parametrize(
    ("held", "computed", "expected"),
    [
        ("float32", "fp32", lambda matrix, layer, head: 0),
        ("float32", "bf16", lambda matrix, layer, head: 2 * (matrix + layer + head)),
        ("bfloat16", "fp32", lambda matrix, layer, head: 4 * (matrix + layer)),
        ("bfloat16", "bf16", lambda matrix, layer, head: 2 * head),
    ],
)
def test_the_plan_counts_weights_that_are_converted(
    held: str, computed: str, expected: Callable[[int, int, int], int], tmp_path: Path
) -> None:
    inputs = write_inputs(tmp_path / "in")
    recipe = tiny_recipe(inputs, tmp_path / "run", model__dtype=held, train__precision=computed)
    memory = check(recipe, processes=1).memory
    trunk = load_trunk(open_checkpoint(inputs / "finetune"), dtype=torch.float32)
    layer = max(sum(weight.numel() for weight in one.parameters()) for one in trunk.layers)
    head = sum(weight.numel() for weight in tiny_head(trunk).parameters() if weight.ndim > 1)
    assert memory.converted_bytes == expected(trunk.lm_head_VD.numel(), layer, head)
    assert memory.total_bytes > memory.trunk_bytes + memory.converted_bytes


def test_a_trunk_that_does_not_fit_is_planned_as_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_inputs(tmp_path / "in")
    weights = inputs / "finetune" / "model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(weights).items()}, weights)
    recipe = tiny_recipe(inputs, tmp_path / "run", train__precision="fp32")
    roomy = check(recipe, processes=1).memory
    monkeypatch.setattr("mtp_train.trunk.precision.main_memory_bytes", lambda: 1000)
    tight = check(recipe, processes=1).memory
    assert (roomy.trunk_bytes, roomy.converted_bytes) == (2 * tight.trunk_bytes, 0)
    assert tight.converted_bytes > 0
