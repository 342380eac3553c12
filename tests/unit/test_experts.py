"""A head's experts: what transformers' own loop computes, in operations whose number does not grow with theirs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_train.heads.experts import GROUPED_EXPERTS, following_autocast
from mtp_train.upstream.transformers_private import experts_of, set_experts
from products import Products
from tiny import ALL_FAMILIES, tiny_head, tiny_trunk
from tolerances import assert_differs, assert_same, num_terms

TOKENS, CHOSEN = 11, 2
LOOP, GROUPED = "eager", "grouped_mm"
HALF = torch.bfloat16


def experts_in(head: nn.Module) -> Iterator[Any]:
    for module in head.modules():
        down = dict(module.named_parameters(recurse=False)).get("down_proj")
        if down is not None and down.ndim == 3:
            yield module


def experts_of_family(name: str) -> Any:
    return next(experts_in(tiny_head(tiny_trunk(name))), None)


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


def test_experts_of_every_family_compute_what_transformers_loop_does() -> None:
    compared = []
    for name in ALL_FAMILIES:
        experts = experts_of_family(name)
        if experts is None:
            continue
        assert experts_of(experts.config) == GROUPED_EXPERTS, name
        terms = TOKENS * num_terms(experts)
        loop, other = computed(experts, LOOP), computed(experts, LOOP, seed=1)
        for found, expected, wrong in zip(computed(experts, GROUPED_EXPERTS), loop, other, strict=True):
            assert_same(found, expected, terms)
            assert_differs(found, wrong, terms)
        compared.append(name)
    assert set(compared) >= {"qwen3_5_moe", "deepseek_v3", "glm4_moe", "gpt_oss"}


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


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation and run it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(num_experts: int, function: str) -> int:
    """Return the number of operations, forward and backward, of tokens that choose among so many experts."""
    some = experts_of_family("qwen3_5_moe")
    config = copy.deepcopy(some.config)
    config.num_experts = num_experts
    experts = type(some)(config)
    for weight in experts.parameters():
        nn.init.normal_(weight)
    with Operations() as operations:
        computed(experts, function)
    return operations.count


def test_the_number_of_operations_does_not_depend_on_the_number_of_experts() -> None:
    assert num_operations(4, GROUPED_EXPERTS) == num_operations(16, GROUPED_EXPERTS)
    assert num_operations(4, LOOP) < num_operations(16, LOOP)


def test_a_trunks_experts_follow_autocast_inside_the_block_alone() -> None:
    config = tiny_trunk("qwen3_5_moe").config
    assert experts_of(config) == GROUPED
    with following_autocast(config):
        assert experts_of(config) == GROUPED_EXPERTS
    assert experts_of(config) == GROUPED
    set_experts(config, LOOP)
    with following_autocast(config):
        assert experts_of(config) == LOOP
    assert experts_of(config) == LOOP
