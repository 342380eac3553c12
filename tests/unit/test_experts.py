"""A head's experts: what transformers' own loop computes, in products whose number does not grow with theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mtp_train.heads.experts import GROUPED_EXPERTS, is_stacked
from products import Products, computed
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk

LOOP, GROUPED = "eager", "grouped_mm"
HALF = torch.bfloat16


def experts_of_family(name: str) -> Any:
    """Return the first module of experts in a family's head; None if it has none."""
    head = tiny_head(tiny_trunk(name))
    stacked = (key for key, value in head.named_parameters() if is_stacked(key, value.shape))
    return next((head.get_submodule(key.rpartition(".")[0]) for key in stacked), None)


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
