"""How many matrix products are computed, and in which dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
