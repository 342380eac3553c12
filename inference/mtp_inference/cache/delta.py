"""The delta rules over a window, expressed as corrections to the state before it.

The gated delta rule (Gated DeltaNet, arXiv:2412.06464, equation 10), for one head, with S of shape (Kd, Vd) and
a_t = exp(g_t)::

    u_t = b_t (v_t - a_t S_{t-1}^T k_t)        S_t = a_t S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

The u_t are called corrections here: what token t adds to the state along its key. With c_t = a_1 ... a_t and
D_ts = c_t / c_s for s <= t, else 0, unrolling gives (section 3.3, one chunk)::

    S_t = c_t S_0 + sum over s of D_ts k_s u_s^T

Put into the first line, this is one system for all corrections, whose matrix is unit lower triangular::

    (I + L) U = diag(b) (V - diag(c) K S_0)        L = strictly lower part of diag(b) (D * K K^T)
    O = diag(c) Q S_0 + (D * Q K^T) U

Row t of U depends only on tokens up to t: a rejected token does not change the corrections before it.

In Kimi Delta Attention (arXiv:2510.26692, equation 1) every key channel decays at its own rate: a_t, c_t and D_ts are
then vectors over Kd, and D scales the terms of K K^T channel by channel.

Shapes: B rows, T tokens of the window, H value heads, Kd key width, Vd value width, N = B * H, X decay rates of a head
(1 or Kd).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MAX_WINDOW = 8
"""Longest window: the deepest draft plus one. :func:`_solve` describes the precision lost beyond it."""


class DeltaWindow(NamedTuple):
    """Additions ``k_t u_t^T`` of a window to a decaying state, until the number of accepted tokens is known."""

    key_NTK: Tensor
    correction_NTV: Tensor
    log_decay_NTX: Tensor
    """Logarithm of c_t."""
    state_BHKV: Tensor
    """State before the window."""

    def to(self, dtype: torch.dtype) -> DeltaWindow:
        """Return the window unchanged: it is in fp32, the only dtype that a state is cast to."""
        return self

    def commit(self, num_kept_B: Tensor, out: Tensor) -> None:
        """Write the state after each row's first ``num_kept_B`` tokens, ``c S_0 + sum of (c / c_t) k_t u_t^T``.

        ``out`` may be the state that the window started from.
        """
        num_kept_N1 = num_kept_B.repeat_interleave(out.shape[1])[:, None]
        is_rejected_NT = torch.arange(self.log_decay_NTX.shape[1], device=num_kept_B.device) >= num_kept_N1
        is_rejected_NT1 = is_rejected_NT[..., None]
        # The log decay only falls, so its minimum over the kept tokens is the last one's; it is 0 if none is kept.
        log_c_N1X = self.log_decay_NTX.masked_fill(is_rejected_NT1, 0.0).amin(1, keepdim=True)
        weight_NTX = (log_c_N1X - self.log_decay_NTX).masked_fill(is_rejected_NT1, -math.inf).exp()
        state_NKV = self.state_BHKV.flatten(0, 1)
        out_NKV = torch.mul(state_NKV, log_c_N1X.exp().mT, out=out.flatten(0, 1))
        out_NKV.baddbmm_((self.key_NTK * weight_NTX).mT, self.correction_NTV)


def delta_window(
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
    """Run a window of either rule; the module's docstring has the formulas.

    The function replaces transformers' ``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention``, hence the
    names and the unused arguments. It returns an undecided window in place of the state.

    Args:
        query: Shape (B, T, key heads, Kd); key heads divide H.
        key: Shape of ``query``.
        value: Shape (B, T, H, Vd).
        g: Log decay, at most 0, shape (B, T, H), or (B, T, H, Kd) where every key channel decays at its own rate.
        beta: Write strength, shape (B, T, H).
        initial_state: fp32, shape (B, H, Kd, Vd).
        use_qk_l2norm_in_kernel: Whether to normalise queries and keys.

    Returns:
        The output (B, T, H, Vd) in the dtype of ``query``, and the window for the commit.
    """
    num_tokens, num_heads = value.shape[1:3]
    if num_tokens > MAX_WINDOW:
        raise ValueError(f"window: {num_tokens} tokens; expected at most {MAX_WINDOW}. Split it into shorter windows.")
    readers_NRK = _readers(query, key, num_heads, use_qk_l2norm_in_kernel)
    key_NTK = readers_NRK[:, num_tokens:]
    log_decay_NTX = heads_first((g[..., None] if g.ndim == 3 else g).float(), num_heads).cumsum(1)
    later_TT1 = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=g.device).triu(1)[..., None]
    decay_NTTX = (log_decay_NTX[:, :, None] - log_decay_NTX[:, None]).masked_fill(later_TT1, -math.inf).exp()
    decay_NRTX = decay_NTTX.repeat(1, 2, 1, 1)
    if g.ndim == 3:
        score_NRT = (readers_NRK @ key_NTK.mT) * decay_NRTX[..., 0]
    else:
        score_NRT = (readers_NRK[:, :, None] * decay_NRTX * key_NTK[:, None]).sum(-1)
    read_NRV = (readers_NRK * log_decay_NTX.exp().repeat(1, 2, 1)) @ initial_state.flatten(0, 1)
    # Queries are the first T of R = 2T readers, keys the rest.
    beta_NT1 = heads_first(beta.float()[..., None], num_heads)
    lower_NTT = (score_NRT[:, num_tokens:] * beta_NT1).tril(-1)
    right_NTV = (heads_first(value.float(), num_heads) - read_NRV[:, num_tokens:]) * beta_NT1
    correction_NTV = _solve(lower_NTT, right_NTV)
    output_NTV = _product(score_NRT[:, :num_tokens], correction_NTV, read_NRV[:, :num_tokens])
    output_NTV = output_NTV * key.shape[-1] ** -0.5
    output = output_NTV.view(-1, num_heads, *output_NTV.shape[1:]).transpose(1, 2)
    return output.to(query.dtype), DeltaWindow(key_NTK, correction_NTV, log_decay_NTX, initial_state)


def delta_token(
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
    """Run one token of either rule, with the arguments of :func:`delta_window` and T = 1.

    A single token is never rejected, so the state is updated in place. This avoids most of its memory traffic.

    Returns:
        The output (B, 1, H, Vd), and ``initial_state``, now the state after the token.
    """
    num_rows, _, num_heads, value_width = value.shape
    readers_N2K = _readers(query, key, num_heads, use_qk_l2norm_in_kernel)
    query_N1K = readers_N2K[:, :1]
    key_N1K = readers_N2K[:, 1:]
    # view, not reshape: a copy would not be updated in place, so raise an error instead.
    state_NKV = initial_state.view(-1, *initial_state.shape[2:])
    # One decay rate for a head, or one for each key channel.
    decay_NX1 = g.float().exp().reshape(len(state_NKV), -1, 1)
    # The state is read once for the query and the key, before it decays: it is most of the memory traffic.
    read_N2V = torch.bmm(readers_N2K * decay_NX1.mT, state_NKV)
    correction_N1V = value.float().reshape(-1, 1, value_width) - read_N2V[:, 1:]
    correction_N1V *= beta.float().reshape(-1, 1, 1)
    state_NKV.mul_(decay_NX1).addcmul_(key_N1K.mT, correction_N1V)
    agreement_N11 = torch.linalg.vecdot(query_N1K, key_N1K)[..., None]
    output_N1V = torch.addcmul(read_N2V[:, :1], correction_N1V, agreement_N11).mul_(key.shape[-1] ** -0.5)
    return output_N1V.view(num_rows, 1, num_heads, value_width).to(query.dtype), initial_state


def _readers(query: Tensor, key: Tensor, num_heads: int, normalise: bool) -> Tensor:
    """Return queries and keys stacked, (N, 2T, Kd): the state is then read once, which is the main cost."""
    readers = torch.cat((query, key), dim=1).float()
    if normalise:
        readers = readers * torch.linalg.vecdot(readers, readers).add_(1e-6).rsqrt_()[..., None]
    return heads_first(readers, num_heads)


def heads_first(part_BThX: Tensor, num_heads: int) -> Tensor:
    """Reshape (B, T, heads, X) to (B * num_heads, T, X); with fewer heads, each is repeated for consecutive heads."""
    num_rows, num_tokens, heads, width = part_BThX.shape
    part_BhTX = part_BThX.transpose(1, 2)
    # Expanded and copied once: repeat_interleave takes several times as long on a CPU.
    repeated = part_BhTX[:, :, None].expand(-1, -1, num_heads // heads, -1, -1)
    return repeated.reshape(num_rows * num_heads, num_tokens, width)


def _solve(lower_NTT: Tensor, right_NTV: Tensor) -> Tensor:
    """Solve (I + L) X = R, where L is strictly lower triangular and T at most 8.

    L^T = 0, hence (I + L)^-1 = (I - L)(I + L^2)(I + L^4). This is exact, and its products cost less than LAPACK's
    batched solve at this size. Powers of L may grow like binomial coefficients, up to 20 at T = 8, which costs two
    digits at worst. At T = 64 no correct digit would remain.
    """
    solved_NTV = _product(lower_NTT, right_NTV, right_NTV, sign=-1)
    power_NTT = lower_NTT
    exponent = 2
    while exponent < right_NTV.shape[1]:
        power_NTT = _product(power_NTT, power_NTT)
        solved_NTV = _product(power_NTT, solved_NTV, solved_NTV)
        exponent *= 2
    return solved_NTV


def _product(left_NTS: Tensor, right_NSV: Tensor, added_NTV: Tensor | None = None, sign: int = 1) -> Tensor:
    """Return ``added + sign * left @ right``, where a sum of the product has at most 8 terms."""
    if torch.compiler.is_compiling():
        # The kernel around it sums them; a product would be a kernel of its own.
        product_NTV = (left_NTS[..., None] * right_NSV[:, None]).sum(2)
        return product_NTV if added_NTV is None else torch.add(added_NTV, product_NTV, alpha=sign)
    return left_NTS @ right_NSV if added_NTV is None else torch.baddbmm(added_NTV, left_NTS, right_NSV, alpha=sign)
