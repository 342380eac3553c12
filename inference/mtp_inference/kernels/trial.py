"""Find out whether a device runs the fused kernels, before a decoder relies on them.

Triton compiles a kernel at its first launch, for which it needs a C compiler and a driver that it supports. The trial
runs every kernel once in small shapes and compares the results with torch's.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_inference.cache.delta import gated_delta_token, gated_delta_window
from mtp_inference.kernels.attention import attend_in_torch, attend_window
from mtp_inference.kernels.conv_delta import conv_in_torch, conv_window, delta_token, delta_window
from mtp_inference.kernels.norms import FORMULAS, GATED_FORMULAS, rms_norm, rms_norm_in_torch
from mtp_inference.kernels.rotary import rotate, rotated_in_torch

TOLERANCE = 1e-2
"""Largest difference from torch's results, relative to the largest value. torch may multiply in TF32, which has ten
bits; a wrong kernel differs by more."""
MIN_CAPABILITY = (8, 0)
"""The oldest NVIDIA devices that the kernels are compiled for in tests."""
_EPSILON = 1e-6


@functools.cache
def runs_kernels(device: torch.device) -> bool:
    """Return whether the fused kernels run on a device; warn if they should and do not.

    They need a CUDA or ROCm device, and Triton, which torch's builds for these devices bring.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    try:
        reason = why_wrong(device)
    # Triton raises errors of many classes, those of the C compiler and of the driver among them.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        warnings.warn(
            f"decoder: fused kernels do not run on {device} ({reason}). Rounds launch more kernels instead, which is "
            "slower for small batches; the text is the same.",
            stacklevel=2,
        )
    return reason is None


@torch.inference_mode()
def why_wrong(device: torch.device) -> str | None:
    """Run every kernel on a device; return the name of the first that is not torch's equal, None if all are.

    Any exception of the kernels is passed on.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x, weight = draw(2, 3, 64), draw(64)
    for formula, gate in ((FORMULAS[-1], None), (GATED_FORMULAS[0], x)):
        found, expected = (
            rms_norm(x, weight, gate, _EPSILON, *formula),
            rms_norm_in_torch(x, weight, gate, _EPSILON, formula),
        )
        if _differs([found], [expected]):
            return "rms_norm"
    conv = draw(2, 64, 4), draw(2, 64, 3), draw(64, 4), None, "silu"
    if _differs(conv_window(*conv), conv_in_torch(*conv)):
        return "conv_window"
    if _delta_differs(draw(2, 3, 4, 16), draw(2, 3, 2, 16), draw(2, 4, 16, 16)):
        return "delta"
    angles = draw(2, 3, 8).repeat(1, 1, 2)
    heads, tables = (draw(2, 4, 3, 16), draw(2, 1, 3, 16)), (angles.cos(), angles.sin())
    if _differs(rotate(*heads, *tables), [rotated_in_torch(one, *tables) for one in heads]):
        return "rotate"
    # A row in one split and a row in several, which has turned around in its buffer; with attention sinks.
    positions_BT = torch.tensor([[3, 4, 5], [498, 499, 500]], device=device)
    window = draw(2, 4, 3, 16), draw(2, 2, 300, 16), draw(2, 2, 300, 8), positions_BT, 290, 0.25, draw(4), 0.0
    return "attend_window" if _differs([attend_window(*window)], [attend_in_torch(*window)]) else None


def _delta_differs(value: Tensor, key: Tensor, state: Tensor) -> bool:
    g, beta = -value[..., 0].abs().contiguous(), value[..., 1].sigmoid()
    output, window = gated_delta_window(
        key, key, value, g=g, beta=beta, initial_state=state, use_qk_l2norm_in_kernel=True
    )
    if _differs(delta_window(key, key, value, g, beta, state, True), [output, *window[:3]]):
        return True
    ours, theirs = state.clone(), state.clone()
    first = [part[:, :1] for part in (key, key, value)]
    expected, _ = gated_delta_token(
        *first, g=g[:, :1], beta=beta[:, :1], initial_state=theirs, use_qk_l2norm_in_kernel=True
    )
    return _differs([delta_token(*first, g[:, :1], beta[:, :1], ours, True), ours], [expected, theirs])


def _differs(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    # Negated, so that NaN differs.
    return not all(
        bool((one - other).abs().max() <= TOLERANCE * other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )
