"""Recurrent layers in a verify window, so that a rejected draft can be undone.

transformers' kernels return the state after the last token only. While a window runs, the kernels that a family names
are replaced by ours, which leave the state alone and keep what each token would add to it; committing adds the kept
tokens' share. Nothing is copied beforehand and no token is run twice. ``inference/benchmarks/rollback.py`` measures
this against a state per token and against replaying the window.

Shapes: B rows, C channels, W kernel width, N inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers.activations import ACT2FN

from mtp_inference.delta import gated_delta_token, gated_delta_window, kimi_delta_window
from mtp_inference.mamba import mamba2_token, mamba2_window
from mtp_train.families import Family


class Undecided(Protocol):
    """What a rule keeps of a window until it is known how many of its tokens count."""

    def joined(self, windows: Sequence[Any], state_BHKV: Tensor) -> Undecided:
        """Return several layers' windows as one of so many more rows; ``state_BHKV`` is the state before it."""

    def commit(self, num_kept_B: Tensor, out: Tensor) -> None:
        """Write the state after each row's first ``num_kept_B`` tokens, 0 or more.

        ``out`` may be the state that the window started from.
        """


def window_conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_unused: object,
) -> Tensor:
    """Run the causal convolution and its activation over the few tokens of a window.

    Takes the place of transformers' ``causal_conv1d_fn`` (hence the names), of whose output the caller reads the
    window's tokens, the last ones. General convolutions are slow at this size.

    Args:
        hidden_states: Shape (B, C, N): the W inputs before the window, then the window's.
        weight: Shape (C, W), one kernel per channel.
        bias: Shape (C,), added before the activation.
        activation: transformers' name of it; None for none.

    Returns:
        Shape (B, C, N - W + 1).
    """
    taps_BCTW = hidden_states.unfold(2, weight.shape[-1], 1)
    # Rounded once, as the convolution it stands for: rounded products let half of all bf16 texts part from plain ones.
    output_BCT = (taps_BCTW * weight[:, None].float()).sum(-1)
    if bias is not None:
        output_BCT = output_BCT + bias[:, None]
    output_BCT = output_BCT.to(hidden_states.dtype)
    return output_BCT if activation is None else ACT2FN[activation](output_BCT)


_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gated_delta": (gated_delta_window, gated_delta_token),
    "kimi_delta": (kimi_delta_window, gated_delta_token),
    "mamba2": (mamba2_window, mamba2_token),
}
"""By a family's name for it: what runs a window, and what runs a single token."""


@contextmanager
def undecided_states(family: Family) -> Iterator[None]:
    """Make recurrent layers keep their windows undecided, for windows that continue an earlier state.

    The replacements are module attributes, seen by every thread. Does nothing for a family without recurrent layers.
    """
    kernels = family.recurrent
    if kernels is None:
        yield
        return
    module = importlib.import_module(family.classes.python_module)
    window_rule, token_rule = _RULES[kernels.rule]
    ours = {kernels.chunked: window_rule, kernels.single: token_rule, kernels.conv: window_conv}
    stock = {name: getattr(module, name) for name in ours}
    for name, function in ours.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in stock.items():
            setattr(module, name, function)
