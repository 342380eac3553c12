"""The floor of a training step consists of the step's own matrix products: all of them, in their layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.training import Bench, counted_flops, make_bench, record_steps
from mtp_inference.bench.chain import Chain
from mtp_inference.bench.products import Operand, Product, Replay, recorded
from mtp_inference.bench.subject import Subject, random_head
from mtp_train.trunk.load import Trunk
from tiny import IS_OLD, family_of

VOCAB, WIDTH, ROWS, TOKENS, DEPTHS = 40, 16, 2, 12, 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}


def bench(num_layers: int, compute: torch.dtype = torch.float32, name: str = "qwen3_5", **fields: int) -> Bench:
    """Return a benchmark of a small trunk: its attention is fused, so all products are with weights."""
    family = family_of(name)
    config = AutoConfig.for_model(
        family.model_types[0],
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        **fields,
    )
    trunk = Trunk(AutoModelForCausalLM.from_config(config), family).eval()
    subject = Subject(trunk, random_head(trunk), Chain.random_text(VOCAB))
    return make_bench(subject, ROWS * TOKENS, TOKENS, DEPTHS, compute_dtype=compute)


def flops(products: list[Product]) -> int:
    return sum(one.flops for one in products)


def layouts(products: list[Product]) -> list[tuple[Any, ...]]:
    return [(one.operation, [operand[1:] for operand in one.tensors], one.options.keys()) for one in products]


@pytest.mark.skipif(IS_OLD, reason="an older transformers multiplies rotary angles as matrices")
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "fields"), [("qwen3_5", {}), ("qwen3_5_moe", EXPERTS)])
def test_a_steps_products_are_those_counted_by_hand(compute: torch.dtype, name: str, fields: dict[str, int]) -> None:
    one = bench(2, compute, name, **fields)
    counted, found = counted_flops(one), record_steps(one)
    # The first token of a row is no target row, and the last one has no target: 10 of 12 rows are multiplied.
    loss = counted["loss"] * (TOKENS - 2) // TOKENS
    assert loss == 2 * VOCAB * WIDTH * ROWS * (TOKENS - 2) * (1 + 2 * DEPTHS)
    assert flops(found.step) == counted["trunk"] + counted["head"] + loss
    assert flops(found.kept_step) == counted["head"] + loss
    assert {operand.dtype for product in found.step for operand in product.operands} == {compute}


def test_a_step_with_one_more_layer_has_the_products_of_that_layer_more() -> None:
    two, three = bench(2), bench(3)
    of_two, of_three = (record_steps(one) for one in (two, three))
    layer = sum(one.numel() for one in three.module.trunk.layers[2].parameters() if one.ndim == 2)
    assert flops(of_three.step) - flops(of_two.step) == 2 * layer * ROWS * TOKENS
    assert flops(of_three.kept_step) == flops(of_two.kept_step)


def test_the_replay_computes_the_recorded_products_and_no_other_ones() -> None:
    found = record_steps(bench(2)).step
    assert layouts(recorded(Replay(found))) == layouts(found)
    assert layouts(recorded(Replay(found[1:]))) != layouts(found)


def test_grouped_products_are_repeated_with_their_groups() -> None:
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    products = recorded(lambda: torch.nn.functional.grouped_mm(torch.randn(7, 8), torch.randn(3, 8, 16), offs=ends))
    assert flops(products) == 2 * 7 * 8 * 16
    (call,) = Replay(products).calls
    assert torch.equal(call.keywords["offs"], ends)
    assert recorded(call)[0].operation is products[0].operation


def test_matrices_that_shared_memory_share_it_again() -> None:
    weight = torch.randn(6, 4)
    products = recorded(lambda: (torch.randn(3, 4) @ weight.T, torch.randn(3, 6) @ weight))
    first, second = (call.args[1] for call in Replay(products).calls)
    assert torch.equal(first, second.T)
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda one: torch.addmm(one(5), one(2, 3), one(3, 5)), 2 * 2 * 3 * 5),
        (lambda one: torch.baddbmm(one(4, 2, 5), one(4, 2, 3), one(4, 3, 5), beta=0.5), 4 * 2 * 2 * 3 * 5),
        (lambda one: torch.nn.functional.linear(one(4, 2, 3), one(5, 3), one(5)), 4 * 2 * 2 * 3 * 5),
        (lambda one: one(4, 2, 3) @ one(4, 3, 5), 4 * 2 * 2 * 3 * 5),
        (lambda one: torch.mm(one(2, 3), one(3, 5), out=one(2, 5)), 2 * 2 * 3 * 5),
        (lambda one: one(2, 0) @ one(0, 5), 0),
        (lambda one: one(2, 3) * one(2, 3), 0),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_every_form_of_a_product_is_counted(work: Any, expected: int, inference: bool) -> None:
    with torch.inference_mode(inference):
        products = recorded(lambda: work(torch.randn))
        assert flops(products) == expected
        assert products == [] or layouts(recorded(Replay(products))) == layouts(products)


def test_an_expanded_matrix_needs_its_own_numbers_only() -> None:
    operand = Operand(0, (4, 3), (0, 1), torch.float32, torch.device("cpu"))
    assert operand.extent == 3
