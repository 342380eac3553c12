"""Mamba-2 over a window, as additions to the state before it.

Mamba-2 (arXiv:2405.21060, equation 16), for one head, with S of shape (P, Ns) and a_t = exp(dt_t A)::

    S_t = a_t S_{t-1} + (dt_t x_t) B_t^T        y_t = S_t C_t + D x_t

What a token adds does not depend on the state, so a window is a ``DeltaWindow`` without corrections to solve for:
``dt_t x_t`` in the place of keys, ``B_t`` in that of corrections.

Shapes: B rows, T tokens of the window, H heads, G groups of heads that share B and C, P head width, Ns state width,
N = B * H.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mtp_inference.delta import DeltaWindow, heads_first


def mamba2_window(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    **_unused: object,
) -> tuple[Tensor, DeltaWindow]:
    """Run a window of Mamba-2; see the module's text.

    Takes the place of transformers' ``mamba2_chunk_scan`` (hence the names and the unused arguments) and differs from
    it in what it returns as the state. Time steps are not clamped: transformers does not when it decodes one by one.

    Args:
        hidden_states: x, shape (B, T, H, P).
        dt: Time steps before their bias and softplus, shape (B, T, H).
        A: Negative, shape (H,).
        B: Shape (B, T, G, Ns); G divides H.
        C: As ``B``.
        D: Shape (H,).
        dt_bias: Shape (H,).
        initial_states: Shape (B, H, P, Ns).

    Returns:
        y of shape (B, T, H, P), fp32, and the window for the commit.
    """
    num_rows, num_tokens, num_heads, _ = hidden_states.shape
    step_BTH = softplus(dt + dt_bias.to(dt.dtype)).float()
    added_NTP = heads_first(hidden_states.float() * step_BTH[..., None], num_heads)
    written_NTS, read_NTS = (heads_first(one.float(), num_heads) for one in (B, C))
    log_decay_NT1 = heads_first((step_BTH * A.float())[..., None], num_heads).cumsum(1)
    left_NTT = (log_decay_NT1 - log_decay_NT1.mT).exp().tril()
    state_NPS = initial_states.flatten(0, 1).float()
    y_NTP = log_decay_NT1.exp() * (read_NTS @ state_NPS.mT) + (read_NTS @ written_NTS.mT * left_NTT) @ added_NTP
    y_BTHP = y_NTP.view(num_rows, num_heads, num_tokens, -1).transpose(1, 2) + D[:, None] * hidden_states.float()
    return y_BTHP, DeltaWindow(added_NTP, written_NTS, log_decay_NT1, initial_states)


def mamba2_token(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    **_unused: object,
) -> Tensor:
    """Run one token of Mamba-2 and leave the state after it in ``state``, as ``mamba2_selective_state_update`` does.

    Args:
        state: Shape (B, H, P, Ns), updated in place.
        hidden_states: x, shape (B, H, P).
        dt: Shape (B, H, P), the same along P; so are ``D`` and ``dt_bias``, of shape (H, P).
        A: Shape (H, P, Ns), the same along P and Ns.
        B: Shape (B, G, Ns).
        C: As ``B``.
        D: See ``dt``.
        dt_bias: See ``dt``.

    Returns:
        y of shape (B, H, P), in the dtype of ``hidden_states``.
    """
    y_B1HP, window = mamba2_window(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        D=D[:, 0],
        dt_bias=dt_bias[:, 0],
        initial_states=state,
    )
    window.commit(torch.ones(len(state), dtype=torch.long, device=state.device), state)
    return y_B1HP[:, 0].to(hidden_states.dtype)
