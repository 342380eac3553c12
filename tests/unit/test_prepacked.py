"""Rounds multiply with packed weights: the same text, never the weights of before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mtp_inference import SpeculativeDecoder, prepacked
from mtp_inference.prepacked import PrepackedLinears, is_plain
from tiny import tiny_head, tiny_trunk
from tolerances import rounding

PROMPTS = [[5, 9, 2, 11, 3], [7, 1, 8, 4, 2, 6]]
DEPTH = 3


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Linear]]:
    """The layers in the order in which they were packed; tiny ones are packed too."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("packs on x86 CPUs")
    monkeypatch.setattr(prepacked, "MIN_NUMBERS", 1)
    monkeypatch.setattr(prepacked, "MIN_NUMBERS_BY_COLUMNS", 1)
    multiply_by_columns(monkeypatch, False)
    packed: list[nn.Linear] = []

    class Noted(prepacked.Pack):
        def __init__(self, layer: nn.Linear) -> None:
            packed.append(layer)
            super().__init__(layer)

    monkeypatch.setattr(prepacked, "Pack", Noted)
    yield packed
    prepacked._packs.clear()


def multiply_by_columns(monkeypatch: pytest.MonkeyPatch, is_faster: bool) -> None:
    monkeypatch.setattr(prepacked, "columns_are_faster", lambda: is_faster)


def decode(decoder: SpeculativeDecoder) -> list[list[int]]:
    return [list(one.token_ids) for one in decoder.decode(PROMPTS, 12)]


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_round_packs_what_it_multiplies_once_and_leaves_the_model_as_it_was(
    by_columns: bool, packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by_columns(monkeypatch, by_columns)
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
    linears = PrepackedLinears([layer])
    input_BTD = torch.randn(1, 4, 8)

    def product() -> torch.Tensor:
        linears.refresh()
        with torch.inference_mode(), linears.used():
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
@pytest.mark.parametrize("by_columns", [False, True])
def test_any_number_of_rows_is_multiplied(
    by_columns: bool, shape: tuple[int, ...], bias: bool, packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by_columns(monkeypatch, by_columns)
    layer = nn.Linear(8, 6, bias=bias)
    # Not contiguous, as the last rows of a longer input are.
    input_BTD = torch.randn(*shape[:-1], 16)[..., 8:]
    with torch.inference_mode(), PrepackedLinears([layer]).used():
        found_BTD = layer(input_BTD)
    expected_BTD = layer(input_BTD).detach()
    torch.testing.assert_close(found_BTD, expected_BTD, atol=rounding(expected_BTD, 8), rtol=0)
    assert found_BTD.is_contiguous()
    assert packs == ([] if by_columns and input_BTD[..., 0].numel() <= 2 else [layer])


def test_a_matrix_too_small_to_pack_is_multiplied_by_columns_only(
    packs: list[nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_by_columns(monkeypatch, True)
    monkeypatch.setattr(prepacked, "MIN_NUMBERS", 49)
    small, large = nn.Linear(8, 6), nn.Linear(8, 7)
    linears = PrepackedLinears([small, large])
    assert linears.layers == [small, large]
    input_BTD = torch.randn(1, 5, 8)
    with torch.inference_mode(), linears.used():
        found_BTD = small(input_BTD)
        large(input_BTD)
    assert torch.equal(found_BTD, small(input_BTD))
    assert packs == [large]
    monkeypatch.setattr(prepacked, "MIN_NUMBERS_BY_COLUMNS", 49)
    assert PrepackedLinears([small, large]).layers == [large]


def test_an_interrupted_round_restores_the_layers() -> None:
    layer = nn.Linear(8, 6)

    def interrupted() -> None:
        with PrepackedLinears([layer]).used():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "forward" not in layer.__dict__


def test_only_plain_fp32_layers_are_packed_and_only_where_the_copies_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        """A layer with a product of its own."""

    hooked = nn.Linear(8, 6)
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    assert is_plain(nn.Linear(8, 6))
    assert not any(map(is_plain, (Other(8, 6), nn.Linear(8, 6).bfloat16(), hooked, nn.Embedding(8, 6))))
    layer = nn.Linear(100, 100, bias=False)
    # 40,000 bytes of weights and as many of copies, in 60 % of the memory.
    for memory, packed in ((140_000, [layer]), (130_000, [])):
        monkeypatch.setattr(prepacked, "main_memory_bytes", lambda memory=memory: memory)
        assert PrepackedLinears([layer]).layers == packed
    monkeypatch.setattr(prepacked, "MIN_NUMBERS", 10_001)
    assert PrepackedLinears([layer]).layers == []
