"""Rounds run linear layers by a faster forward: the same text, never the weights of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from calls import calls_of
from mtp_inference import SpeculativeDecoder, cpu_layers
from mtp_inference.cpu_layers import CpuLayers, is_plain
from mtp_train.trunk.precision import bf16_support
from tiny import tiny_head, tiny_trunk
from tolerances import rounding

PROMPTS = [[5, 9, 2, 11, 3], [7, 1, 8, 4, 2, 6]]
DEPTH = 3


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The matrices in the order in which they were packed; tiny ones are packed too."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("packs on x86 CPUs")
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS", 1)
    run_on_amd(monkeypatch, False)
    return calls_of(monkeypatch, cpu_layers, "pack")


def run_on_amd(monkeypatch: pytest.MonkeyPatch, is_amd: bool) -> None:
    """Choose products as on AMD's CPUs, or as on others, where one or two fp32 rows are not packed."""
    # Only the choice is set: every x86 CPU runs each product for real.
    monkeypatch.setattr(cpu_layers, "runs_on_amd", lambda: is_amd)


def decode(decoder: SpeculativeDecoder) -> list[list[int]]:
    return [list(one.token_ids) for one in decoder.generate(PROMPTS, 12)]


@pytest.mark.parametrize("is_amd", [False, True])
def test_a_round_packs_what_it_multiplies_once_and_leaves_the_model_as_it_was(
    is_amd: bool, packs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_amd(monkeypatch, is_amd)
    trunk = tiny_trunk("qwen3_5")
    before = {name: dict(module.__dict__) for name, module in trunk.causal_lm.named_modules()}
    decoder = SpeculativeDecoder(trunk, tiny_head(trunk), DEPTH, eos_ids=())
    texts = decode(decoder)
    assert len(packs) == len({id(weight) for (weight,) in packs}) > 8
    assert {name: dict(module.__dict__) for name, module in trunk.causal_lm.named_modules()} == before
    again = SpeculativeDecoder(trunk, decoder.drafting, DEPTH, eos_ids=())
    count = len(packs)
    assert decode(again) == texts
    assert len(packs) == count
    plain = SpeculativeDecoder(tiny_trunk("qwen3_5"), None, 0, eos_ids=(), max_batch=1)
    assert decode(plain) == texts


@pytest.mark.parametrize("how", ["in place", "through data", "another tensor"])
def test_a_changed_weight_is_packed_again(packs: list[Any], how: str) -> None:
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


BF16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(not bf16_support(torch.device("cpu"))[0], reason="multiplies bf16 slowly")
)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 1, 64), (1, 2, 64), (64,), (1, 5, 64), (3, 1, 64)])
@pytest.mark.parametrize("is_amd", [False, True])
def test_any_number_of_rows_is_multiplied(
    is_amd: bool,
    shape: tuple[int, ...],
    bias: bool,
    dtype: torch.dtype,
    packs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on_amd(monkeypatch, is_amd)
    layer = nn.Linear(64, 48, bias=bias).to(dtype)
    # Not contiguous, as the last rows of a longer input are.
    input_BTD = torch.randn(*shape[:-1], 128).to(dtype)[..., 64:]
    with torch.inference_mode(), CpuLayers([layer]).used():
        found_BTD = layer(input_BTD)
    expected_BTD = layer(input_BTD).detach()
    torch.testing.assert_close(found_BTD, expected_BTD, atol=rounding(expected_BTD, 64), rtol=0)
    assert found_BTD.is_contiguous()
    is_packed = is_amd or dtype is torch.bfloat16 or input_BTD[..., 0].numel() > 2
    assert len(packs) == int(is_packed)


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
        monkeypatch.setattr(cpu_layers, "slow_halves", lambda dtype, device, native=native: not native)
        assert is_plain(nn.Linear(8, 6).bfloat16()) == native
    layer = nn.Linear(100, 100, bias=False)
    # 40,000 bytes of weights and as many of copies, in 60 % of the memory.
    for memory, packed in ((140_000, [layer]), (130_000, [])):
        monkeypatch.setattr(cpu_layers, "main_memory_bytes", lambda memory=memory: memory)
        assert list(CpuLayers([layer]).products) == packed
    monkeypatch.setattr(cpu_layers, "MIN_NUMBERS", 10_001)
    assert not CpuLayers([layer]).products
