"""Every use of an undocumented part of torch: the two halves of its attention on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

SYMBOLS = (
    # scaled_dot_product_attention keeps its mask, and keys and values for each call, until the backward pass.
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, width) of attention on a CPU, and the log of each softmax denominator (B, H, T)."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, attn_mask=bias, scale=scaling)


def cpu_attention_gradients(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], outputs: tuple[Tensor, Tensor], bias: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from that of the output of :func:`cpu_attention`."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, *inputs, *outputs, 0.0, False, attn_mask=bias, scale=scaling)
