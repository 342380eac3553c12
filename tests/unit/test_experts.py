"""A head's experts: what transformers' own loop computes, in products whose number does not grow with theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtp_train.heads.experts import GROUPED_EXPERTS, is_stacked
from mtp_train.upstream.transformers_private import set_experts
from products import Products
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk

TOKENS, CHOSEN = 11, 2
LOOP, GROUPED = "eager", "grouped_mm"
HALF = torch.bfloat16


def experts_of_family(name: str) -> Any:
    """Return the first module of experts in a family's head; None if it has none."""
    head = tiny_head(tiny_trunk(name))
    stacked = (key for key, value in head.named_parameters() if is_stacked(key, value.shape))
    return next((head.get_submodule(key.rpartition(".")[0]) for key in stacked), None)


def computed(experts: Any, function: str, seed: int = 0) -> list[Tensor]:
    """Return the output and all gradients of a module of experts by a function, on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    state_ND = torch.randn(TOKENS, width, generator=generator, requires_grad=True)
    chosen_NE = torch.randint(experts.num_experts, (TOKENS, CHOSEN), generator=generator)
    weight_NE = torch.rand(TOKENS, CHOSEN, generator=generator).requires_grad_()
    set_experts(experts.config, function)
    output_ND = experts(state_ND, chosen_NE, weight_NE)
    slope_ND = torch.randn(output_ND.shape, generator=generator)
    wanted = [state_ND, weight_NE, *experts.parameters()]
    return [output_ND.detach(), *torch.autograd.grad(output_ND, wanted, slope_ND.to(output_ND.dtype))]


@pytest.mark.parametrize("name", [name for name in ("qwen3_5_moe", "gpt_oss", "nemotron_h") if name in ALL_FAMILIES])
def test_products_are_in_autocasts_dtype_and_gradients_in_the_weights(name: str) -> None:
    """With and without biases, transposed weights and gates."""
    experts = experts_of_family(name)
    dtypes = {}
    for function in (GROUPED_EXPERTS, GROUPED):
        with Products() as products, torch.autocast("cpu", HALF):
            found = computed(experts, function)
        assert {one.dtype for one in found[1:]} == {torch.float32}
        dtypes[function] = products.dtypes
    # transformers' own function is the control.
    assert dtypes == {GROUPED_EXPERTS: {HALF}, GROUPED: {torch.float32}}


def num_products(num_experts: int, function: str) -> int:
    """Return the number of products, forward and backward, of tokens that choose among so many experts."""
    some = experts_of_family("qwen3_5_moe")
    config = copy.deepcopy(some.config)
    config.num_experts = num_experts
    experts = type(some)(config)
    for weight in experts.parameters():
        nn.init.normal_(weight)
    with Products() as products:
        computed(experts, function)
    return products.count


def test_the_number_of_products_does_not_depend_on_the_number_of_experts() -> None:
    assert num_products(4, GROUPED_EXPERTS) == num_products(16, GROUPED_EXPERTS)
    assert num_products(4, LOOP) < num_products(16, LOOP)
