"""Compute a mixture's experts by grouped matrix products: a function that is registered with transformers.

transformers' own loop over experts waits for the device at each expert. In its backward pass, each expert also fills a
gradient of the size of all experts, so the time of a step grows with the square of their number. Its grouped products
do neither, but multiply in the dtype in which the weights are held, also under autocast (pytorch/pytorch#174763).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor, nn

from mtp_train.upstream.transformers_private import ALL_EXPERTS_FUNCTIONS

GROUPED_EXPERTS = "mtp_grouped_mm"
_STOCK = "grouped_mm"
"""transformers' choice for a model that it loads."""


def is_stacked(name: str, shape: Size) -> bool:
    """Return whether a weight of this name and shape has the matrices of all experts."""
    return ".experts." in name and len(shape) == 3


class _Converted:
    """An experts module whose weights are read in another dtype; gradients reach the weights."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def grouped_experts(experts: nn.Module, state_ND: Tensor, chosen_NE: Tensor, weight_NE: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of E experts for N tokens, (N, D), by products in autocast's dtype.

    ``chosen_NE`` holds the numbers of each token's experts, ``weight_NE`` the weights of their outputs.
    """
    dtype = autocast_dtype(state_ND.device)
    read = experts if dtype is None else _Converted(experts, dtype)
    return ALL_EXPERTS_FUNCTIONS[_STOCK](read, state_ND, chosen_NE, weight_NE)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies on a device; None where it is off, or the device has none."""
    kind = device.type
    # Some devices have no autocast: asking whether it is enabled raises there.
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS, grouped_experts)
