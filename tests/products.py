"""How many matrix products are computed, and in which dtypes; and what modules of experts compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_train.upstream.transformers_private import set_experts

EXPERT_TOKENS, CHOSEN_EXPERTS = 11, 2
"""Tokens that a module of experts computes, and the experts of each."""
# Inference mode shows linear layers whole.
_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._grouped_mm.default,
)


class Products(TorchDispatchMode):
    """Notes number and dtypes of the products of linear layers, experts and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation and run it."""
        if func in _PRODUCTS:
            self.count += 1
            # Grouped products are also given where their groups end.
            self.dtypes |= {one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()}
        return func(*args, **(kwargs or {}))


def computed(experts: Any, function: str, seed: int = 0) -> list[Tensor]:
    """Return the output and all gradients of a module of experts by a function, on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    state_ND = torch.randn(EXPERT_TOKENS, width, generator=generator, requires_grad=True)
    chosen_NE = torch.randint(experts.num_experts, (EXPERT_TOKENS, CHOSEN_EXPERTS), generator=generator)
    weight_NE = torch.rand(EXPERT_TOKENS, CHOSEN_EXPERTS, generator=generator).requires_grad_()
    set_experts(experts.config, function)
    output_ND = experts(state_ND, chosen_NE, weight_NE)
    slope_ND = torch.randn(output_ND.shape, generator=generator)
    wanted = [state_ND, weight_NE, *experts.parameters()]
    return [output_ND.detach(), *torch.autograd.grad(output_ND, wanted, slope_ND.to(output_ND.dtype))]
