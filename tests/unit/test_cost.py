"""Operations and disk of a run, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Size

from mtp_train import check
from mtp_train.train.estimate import Sizes, active_weights, estimate_cost, key_weights
from mtp_train.train.plan import make_plan
from runs import tiny_recipe, write_inputs
from tiny import ALL_FAMILIES

SIZES = Sizes(
    trunk=100, head=10, head_keys=0, lm_head=1000, draft_lm_head=1000, head_stored=12, state=8, head_trained=11
)


def test_a_token_is_multiplied_with_the_experts_that_it_uses_and_with_no_embedding() -> None:
    shapes = {
        "embed_tokens.weight": Size([50, 8]),
        "layers.0.self_attn.q_proj.weight": Size([8, 8]),
        "layers.0.input_layernorm.weight": Size([8]),
        "layers.0.linear_attn.conv1d.weight": Size([8, 1, 4]),
        "layers.0.mlp.gate.weight": Size([4, 8]),
        "layers.0.mlp.experts.gate_up_proj": Size([4, 12, 8]),
        "layers.0.mlp.experts.down_proj": Size([4, 8, 6]),
        "lm_head.weight": Size([50, 8]),
    }
    assert active_weights(shapes, 2) == 64 + 32 + 32 + 2 * (12 * 8 + 8 * 6)
    assert active_weights(shapes, 4) == 64 + 32 + 32 + 4 * (12 * 8 + 8 * 6)


def test_operations_by_hand(tmp_path: Path) -> None:
    regenerate = {"enabled": True, "max_prompts": 5, "max_new_tokens": 7}
    recipe = tiny_recipe(tmp_path, tmp_path / "run", data__regenerate=regenerate)
    plan = make_plan(recipe, 1)
    tokens = 4 * 192
    assert plan.total_tokens == tokens
    cost = estimate_cost(recipe, plan, SIZES)
    assert cost.regenerate_flops == 2 * 1100 * 5 * 7
    assert cost.trunk_flops == 2 * 100 * tokens
    assert cost.head_flops == 6 * 10 * tokens * 2
    # The trunk's product once a target; for each of two depths one forward and one for the gradient.
    assert cost.loss_flops == 2 * 1000 * tokens * (1 + 2 * 2)
    assert cost.total_flops == sum((cost.regenerate_flops, cost.trunk_flops, cost.head_flops, cost.loss_flops))
    # Two resume states of three fp32 numbers for what is trained, the head and its export in two bytes.
    assert cost.disk_bytes == 11 * 3 * 12 + 12 * 2 * 2


def test_modules_that_read_the_text_themselves_make_its_keys_once_for_every_depth_before(tmp_path: Path) -> None:
    shapes = {
        "blocks.0.embed_norm.weight": Size([8]),
        "blocks.0.proj.weight": Size([8, 16]),
        "blocks.0.layer.self_attn.q_proj.weight": Size([8, 8]),
        "blocks.0.layer.self_attn.k_proj.weight": Size([4, 8]),
        "blocks.0.layer.self_attn.o_proj.weight": Size([8, 8]),
        "blocks.0.layer.mlp.up_proj.weight": Size([12, 8]),
        "blocks.0.lm_head.weight": Size([50, 8]),
    }
    assert key_weights(shapes) == 8 * 16 + 8 * 8 + 4 * 8
    recipe = tiny_recipe(tmp_path, tmp_path / "run", head__num_depths=3)
    plan = make_plan(recipe, 1)
    cost = estimate_cost(recipe, plan, replace(SIZES, head_keys=4))
    # Module 2 reads the text, module 3 the text and the first drafts.
    assert cost.head_flops == 6 * (3 * 10 + 3 * 4) * plan.total_tokens


@pytest.mark.skipif("step3p7" not in ALL_FAMILIES, reason="this transformers has no Step-3.7")
def test_the_plan_counts_what_modules_read_as_llama_cpp_has_them_do(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "in", "step3p7")
    flops = {}
    for convention in ("auto", "llama.cpp"):
        recipe = tiny_recipe(inputs, tmp_path / "run", head__convention=convention, head__num_depths=3)
        result = check(recipe, processes=1)
        flops[convention] = result.cost.head_flops // result.plan.total_tokens
    projected = 32 * 64 + 32 * (64 + 16 + 16) + 4 * 32
    after = 64 * 32 + 3 * 48 * 32
    assert flops == {"auto": 6 * 3 * (projected + after), "llama.cpp": 6 * 3 * (2 * projected + after)}


def test_cross_entropy_on_given_text_needs_no_teacher_and_no_answers(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, tmp_path / "run", objective={"loss": "ce"})
    cost = estimate_cost(recipe, make_plan(recipe, 1), SIZES)
    assert cost.regenerate_flops == 0
    assert cost.loss_flops == 2 * 1000 * 4 * 192 * 2 * 2


@pytest.mark.parametrize(("dtype", "each"), [("auto", 4), ("bf16", 2), ("fp8", 1)])
def test_hidden_states_count_once_a_token_and_no_more_than_they_may(dtype: str, each: int, tmp_path: Path) -> None:
    used = tiny_recipe(tmp_path, tmp_path / "run", train__hidden_cache={"dtype": dtype})
    plan = make_plan(used, 1)
    without = estimate_cost(tiny_recipe(tmp_path, tmp_path / "run"), plan, SIZES).disk_bytes
    assert estimate_cost(used, plan, SIZES).disk_bytes == without + plan.total_tokens * 8 * each
    bounded = tiny_recipe(tmp_path, tmp_path / "run", train__hidden_cache={"dtype": dtype, "max_gib": 2.0**-20})
    assert estimate_cost(bounded, plan, SIZES).disk_bytes == without + 1024
