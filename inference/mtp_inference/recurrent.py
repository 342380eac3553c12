"""Recurrent layers in a verify window, so that a rejected draft can be undone.

transformers' kernels return the state after the last token only. While a window runs, the kernels that a family names
are replaced by ours, which leave the state alone and keep what each token would add to it; committing adds the kept
tokens' share. Nothing is copied beforehand and no token is run twice. ``inference/benchmarks/rollback.py`` measures
this against a state per token and against replaying the window.

The gated delta rule (Gated DeltaNet, arXiv:2412.06464, equation 10), for one head, with S of shape (Kd, Vd) and
a_t = exp(g_t)::

    u_t = b_t (v_t - a_t S_{t-1}^T k_t)        S_t = a_t S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

The u_t are called corrections here: what token t adds to the state along its key. With c_t = a_1 ... a_t and
D_ts = c_t / c_s for s <= t, else 0, unrolling gives (section 3.3, one chunk)::

    S_t = c_t S_0 + sum over s of D_ts k_s u_s^T

Put into the first line, this is one system for all corrections, whose matrix is unit lower triangular::

    (I + L) U = diag(b) (V - diag(c) K S_0)        L = strictly lower part of diag(b) (D * K K^T)
    O = diag(c) Q S_0 + (D * Q K^T) U

Row t of U depends on tokens up to t alone: a rejected token never touches the corrections before it.

Shapes: B rows, T tokens of the window, H value heads, Kd key width, Vd value width, N = B * H, C channels, W kernel
width.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from mtp_train.families import Family

MAX_WINDOW = 8
"""Longest window, that of the deepest draft; :func:`_solve` says what would be lost beyond it."""


class Undecided(Protocol):
    """What a rule keeps of a window until it is known how many of its tokens count."""

    def joined(self, windows: Sequence[Any], state_BHKV: Tensor) -> Undecided:
        """Return several layers' windows as one of so many more rows; ``state_BHKV`` is the state before it."""

    def commit(self, num_kept_B: Tensor, out: Tensor) -> None:
        """Write the state after each row's first ``num_kept_B`` tokens, 0 or more.

        ``out`` may be the state that the window started from.
        """


class DeltaWindow(NamedTuple):
    """A window of the gated delta rule."""

    key_NTK: Tensor
    correction_NTV: Tensor
    log_decay_NT: Tensor
    """Logarithm of c_t."""
    state_BHKV: Tensor
    """Before the window."""

    def joined(self, windows: Sequence[DeltaWindow], state_BHKV: Tensor) -> DeltaWindow:
        """See :class:`Undecided`."""
        return DeltaWindow(
            torch.cat([window.key_NTK for window in windows]),
            torch.cat([window.correction_NTV for window in windows]),
            torch.cat([window.log_decay_NT for window in windows]),
            state_BHKV,
        )

    def commit(self, num_kept_B: Tensor, out: Tensor) -> None:
        """See :class:`Undecided`: ``c S_0 + sum over kept t of (c / c_t) k_t u_t^T``."""
        num_kept_N1 = num_kept_B.repeat_interleave(out.shape[1])[:, None]
        is_rejected_NT = torch.arange(self.log_decay_NT.shape[1], device=num_kept_B.device) >= num_kept_N1
        # Log decay only falls: its least value among the kept tokens is the last one's, 0 where none is kept.
        log_c_N1 = self.log_decay_NT.masked_fill(is_rejected_NT, 0.0).amin(1, keepdim=True)
        weight_NT = (log_c_N1 - self.log_decay_NT).masked_fill(is_rejected_NT, -math.inf).exp()
        state_NKV = self.state_BHKV.flatten(0, 1)
        out_NKV = torch.mul(state_NKV, log_c_N1.exp()[..., None], out=out.flatten(0, 1))
        out_NKV.baddbmm_((self.key_NTK * weight_NT[..., None]).mT, self.correction_NTV)


def gated_delta_window(
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
    """Run a window of the gated delta rule; see the module's text.

    Takes the place of transformers' ``torch_chunk_gated_delta_rule`` (hence the names and the unused arguments) and
    differs from it in what it returns as the state.

    Args:
        query: Shape (B, T, key heads, Kd); key heads divide H.
        key: As ``query``.
        value: Shape (B, T, H, Vd).
        g: Log decay, shape (B, T, H), at most 0.
        beta: Write strength, shape (B, T, H).
        initial_state: fp32, shape (B, H, Kd, Vd).
        use_qk_l2norm_in_kernel: Whether to normalise queries and keys.

    Returns:
        The output (B, T, H, Vd) in the dtype of ``query``, and the window for the commit.

    Raises:
        ValueError: The window is longer than ``MAX_WINDOW``.
    """
    num_rows, num_tokens, num_heads, value_width = value.shape
    if num_tokens > MAX_WINDOW:
        raise ValueError(f"window: {num_tokens} tokens; expected at most {MAX_WINDOW}. Split it into shorter windows.")
    readers_NRK = _readers(query, key, num_heads, use_qk_l2norm_in_kernel)
    log_decay_NT = _heads_first(g.float()[..., None], num_heads)[..., 0].cumsum(-1)
    decay_NTT = (log_decay_NT[:, :, None] - log_decay_NT[:, None]).exp().tril()
    key_NTK = readers_NRK[:, num_tokens:]
    read_NRV = (readers_NRK @ initial_state.flatten(0, 1)) * log_decay_NT.exp().repeat(1, 2)[..., None]
    score_NRT = (readers_NRK @ key_NTK.mT) * decay_NTT.repeat(1, 2, 1)
    beta_NT1 = _heads_first(beta.float()[..., None], num_heads)
    lower_NTT = (score_NRT[:, num_tokens:] * beta_NT1).tril(-1)
    wanted_NTV = _heads_first(value.float(), num_heads) - read_NRV[:, num_tokens:]
    correction_NTV = _solve(lower_NTT, wanted_NTV * beta_NT1)
    output_NTV = torch.baddbmm(read_NRV[:, :num_tokens], score_NRT[:, :num_tokens], correction_NTV)
    output = (output_NTV * key.shape[-1] ** -0.5).view(num_rows, num_heads, num_tokens, value_width)
    window = DeltaWindow(key_NTK, correction_NTV, log_decay_NT, initial_state)
    return output.transpose(1, 2).to(query.dtype), window


def gated_delta_token(
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
    """Run one token of the gated delta rule: arguments as for :func:`gated_delta_window`, T is 1.

    Nothing of one token is ever rejected: the state is updated in place, which spares most of its traffic.

    Returns:
        The output (B, 1, H, Vd), and ``initial_state``, now the state after the token.
    """
    num_rows, _, num_heads, value_width = value.shape
    readers_N2K = _readers(query, key, num_heads, use_qk_l2norm_in_kernel)
    query_N1K, key_N1K = readers_N2K[:, :1], readers_N2K[:, 1:]
    beta_N11 = beta.float().reshape(-1, 1, 1)
    # A view, or this fails: rows of a buffer lie next to each other.
    state_NKV = initial_state.view(-1, *initial_state.shape[2:])
    state_NKV.mul_(g.float().exp().reshape(-1, 1, 1))
    correction_N1V = (value.float().reshape(-1, 1, value_width) - key_N1K @ state_NKV) * beta_N11
    state_NKV.baddbmm_(key_N1K.mT, correction_N1V)
    output = (query_N1K @ state_NKV) * key.shape[-1] ** -0.5
    return output.view(num_rows, 1, num_heads, value_width).to(query.dtype), initial_state


def _readers(query: Tensor, key: Tensor, num_heads: int, normalise: bool) -> Tensor:
    """Return queries and keys below each other, (N, 2T, Kd): so the state, which is what costs, is read once."""
    readers = torch.cat((query, key), dim=1).float()
    if normalise:
        readers = readers * torch.rsqrt(readers.square().sum(-1, keepdim=True) + 1e-6)
    return _heads_first(readers, num_heads)


def _heads_first(part_BThX: Tensor, num_heads: int) -> Tensor:
    """Return (N, T, X); a key head serves consecutive value heads."""
    part_BhTX = part_BThX.transpose(1, 2)
    if part_BhTX.shape[1] != num_heads:
        part_BhTX = part_BhTX.repeat_interleave(num_heads // part_BhTX.shape[1], dim=1)
    return part_BhTX.flatten(0, 1)


def _solve(lower_NTT: Tensor, right_NTV: Tensor) -> Tensor:
    """Solve (I + L) X = R, where L is strictly lower triangular and T at most 8.

    L^T = 0, hence (I + L)^-1 = (I - L)(I + L^2)(I + L^4): exact, and three products each cost less than LAPACK's
    batched solve at this size. Powers of L may grow like binomial coefficients, up to 20 at T = 8: two digits lost at
    worst. At T = 64 nothing would be left.
    """
    solved_NTV = torch.baddbmm(right_NTV, lower_NTT, right_NTV, alpha=-1)
    power_NTT, exponent = lower_NTT, 2
    while exponent < right_NTV.shape[1]:
        power_NTT = power_NTT @ power_NTT
        solved_NTV = torch.baddbmm(solved_NTV, power_NTT, solved_NTV)
        exponent *= 2
    return solved_NTV


def window_conv(
    inputs_BCN: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
    activation: str | None = None,
    **_unused: object,
) -> Tensor:
    """Run the causal convolution and its activation over the few tokens of a window.

    Takes the place of transformers' ``causal_conv1d_fn``, of whose output the caller reads the window's tokens, the
    last ones. General convolutions are slow at this size.

    Args:
        inputs_BCN: The W inputs before the window, then the window's.
        weight_CW: One kernel per channel.
        bias_C: Added before the activation.
        activation: transformers' name of it; None for none.

    Returns:
        Shape (B, C, N - W + 1).
    """
    taps_BCTW = inputs_BCN.unfold(2, weight_CW.shape[-1], 1)
    # Rounded once, as the convolution it stands for: rounded products let half of all bf16 texts part from plain ones.
    output_BCT = (taps_BCTW * weight_CW[:, None].float()).sum(-1)
    if bias_C is not None:
        output_BCT = output_BCT + bias_C[:, None]
    output_BCT = output_BCT.to(inputs_BCN.dtype)
    return output_BCT if activation is None else ACT2FN[activation](output_BCT)


_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gated_delta": (gated_delta_window, gated_delta_token)
}


@contextmanager
def undecided_states(family: Family) -> Iterator[None]:
    """Make recurrent layers keep their windows undecided, for windows that continue an earlier state.

    The replacements are module attributes, seen by every thread. Does nothing for a family without recurrent layers.
    """
    kernels = family.recurrent
    if kernels is None:
        yield
        return
    module = importlib.import_module(family.borrowed.python_module)
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
