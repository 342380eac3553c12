"""Run a window's convolution and its gated delta rule in one launch each.

Libraries have such kernels for one token or for a prompt. Those of flash-linear-attention and of causal-conv1d write
the state after the last token, and a verify window needs what undoes its rejected tokens: the inputs of the convolution
and the corrections of ``cache/delta.py``. Both libraries also replace transformers' functions wherever they are
installed, which breaks other devices.

Shapes: B rows, T tokens of the window, C channels, W kernel width, N = W + T, h key heads, H value heads, Kd key width,
Vd value width, M = B * H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.delta import DeltaWindow, gated_delta_token, gated_delta_window, require_short
from mtp_inference.kernels import run_on_gpus, torch_operation
from mtp_train.upstream.transformers_private import ACT2FN

CONV_ACTIVATIONS = ("", "silu")
"""Activations that the convolution's kernel has; empty for none."""


def conv_in_torch(
    before_BCW: Tensor, inputs_BCT: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the inputs before the window followed by the window's, and the convolution's output (B, T, C).

    Products and sums are in fp32 and rounded once before the activation, as in ``cache/recurrent.py``.
    """
    known_BCN = torch.cat([before_BCW, inputs_BCT], dim=-1)
    taps_BCTW = known_BCN.unfold(2, weight_CW.shape[-1], 1)[:, :, 1:]
    output_BCT = (taps_BCTW * weight_CW[:, None].float()).sum(-1)
    if bias_C is not None:
        output_BCT = output_BCT + bias_C[:, None]
    output_BCT = output_BCT.to(known_BCN.dtype)
    if activation:
        output_BCT = ACT2FN[activation](output_BCT)
    return known_BCN, output_BCT.transpose(1, 2).contiguous()


@torch_operation("mtp_inference::conv_window", mutates_args=())
def conv_window(
    before: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Run the causal convolution of a window by one operation; see :func:`conv_in_torch`."""
    return conv_in_torch(before, inputs, weight, bias, activation)


run_on_gpus(conv_window, "launch_conv_window")


@torch_operation("mtp_inference::delta_window", mutates_args=())
def delta_window(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalises: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a window of the gated delta rule by one operation; see ``cache/delta.py``.

    Returns:
        The output (B, T, H, Vd) and the parts of the window: keys (M, T, Kd), corrections (M, T, Vd) and the logarithm
        of the decay since the window's start (M, T, 1), in fp32.
    """
    output, window = gated_delta_window(
        query, key, value, g=g, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=normalises
    )
    # Operations must not return views of one another.
    return output.contiguous(), window.key_NTK.clone(), window.correction_NTV, window.log_decay_NTX.clone()


run_on_gpus(delta_window, "launch_delta_window")


@torch_operation("mtp_inference::delta_token", mutates_args=("state",))
def delta_token(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalises: bool
) -> Tensor:
    """Run one token of the gated delta rule by one operation; update ``state`` in place; return (B, 1, H, Vd)."""
    output, _ = gated_delta_token(
        query, key, value, g=g, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=normalises
    )
    return output.contiguous()


run_on_gpus(delta_token, "launch_delta_token")


def fused_conv(
    before_BCW: Tensor, inputs_BCT: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Run :func:`conv_window`, and an activation that it lacks after it.

    Returns:
        The inputs (B, C, N), and the output as transformers' convolutions return it, (B, C, T).
    """
    inside = activation if activation in CONV_ACTIVATIONS else ""
    known_BCN, output_BTC = torch.ops.mtp_inference.conv_window(before_BCW, inputs_BCT, weight_CW, bias_C, inside or "")
    if activation is not None and not inside:
        output_BTC = ACT2FN[activation](output_BTC)
    return known_BCN, output_BTC.transpose(1, 2)


def fused_delta_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_unused: object,
) -> tuple[Tensor, DeltaWindow]:
    """Run :func:`~mtp_inference.cache.delta.gated_delta_window` in one launch."""
    require_short(value.shape[1])
    output, key_NTK, correction_NTV, log_decay_NT1 = torch.ops.mtp_inference.delta_window(
        query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel
    )
    return output, DeltaWindow(key_NTK, correction_NTV, log_decay_NT1, initial_state)


def fused_delta_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_unused: object,
) -> tuple[Tensor, Tensor]:
    """Run :func:`~mtp_inference.cache.delta.gated_delta_token` in one launch."""
    output: Tensor = torch.ops.mtp_inference.delta_token(
        query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel
    )
    return output, initial_state
