"""Per-token states of recurrent layers, so that a rejected draft can be undone.

transformers' chunked kernels return the state after the last token only. While a verify window runs, the kernel that a
family names is replaced by one that keeps the state after every token; committing then picks one of them. No state is
copied beforehand and no token is run twice.

Shapes: B rows, T tokens of the window, H value heads, Kd key width, Vd value width, N = B * H.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mtp_train.families import Family


def gated_delta_per_token(
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
    """Run the gated delta rule token by token and keep every state.

    Gated DeltaNet (arXiv:2412.06464, equation 10), with ``S`` of shape (Kd, Vd):
    ``S_t = a_t S_{t-1} + k_t outer b_t (v_t - a_t S_{t-1}^T k_t)`` and ``o_t = S_t^T q_t``, where ``a_t = exp(g_t)``.
    Takes the place of transformers' ``torch_chunk_gated_delta_rule`` (hence the names and the unused arguments) and
    differs from it in what it returns as the state.

    Args:
        query: Shape (B, T, key heads, Kd); key heads divide H.
        key: As ``query``.
        value: Shape (B, T, H, Vd).
        g: Log decay, shape (B, T, H), at most 0.
        beta: Write strength, shape (B, T, H).
        initial_state: Shape (B, H, Kd, Vd).
        use_qk_l2norm_in_kernel: Whether to normalise queries and keys.

    Returns:
        The output (B, T, H, Vd) in the dtype of ``query``, and the fp32 state after each token, (T, B, H, Kd, Vd).
    """
    num_rows, num_tokens, num_heads, value_width = value.shape
    key_width, flat = key.shape[-1], num_rows * num_heads
    out_dtype = query.dtype
    # transformers before 5.18 repeats grouped heads itself.
    if key.shape[2] != num_heads:
        query, key = (heads.repeat_interleave(num_heads // key.shape[2], dim=2) for heads in (query, key))
    query, key, value, beta, decay = (part.transpose(0, 1).float() for part in (query, key, value, beta, g.exp()))
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    # Everything that does not depend on the state is ready before the loop: three operations per token remain.
    erase_TN1K = (key * (beta * decay)[..., None]).reshape(num_tokens, flat, 1, key_width)
    write_TN1V = (value * beta[..., None]).reshape(num_tokens, flat, 1, value_width)
    key_TNK1 = key.reshape(num_tokens, flat, key_width, 1)
    decay_TN11 = decay.reshape(num_tokens, flat, 1, 1)
    states_TNKV = value.new_empty(num_tokens, flat, key_width, value_width)
    state_NKV = initial_state.float().reshape(flat, key_width, value_width)
    for token in range(num_tokens):
        delta_N1V = torch.baddbmm(write_TN1V[token], erase_TN1K[token], state_NKV, alpha=-1)
        state_NKV = torch.mul(state_NKV, decay_TN11[token], out=states_TNKV[token])
        state_NKV.baddbmm_(key_TNK1[token], delta_N1V)
    query_TN1K = query.reshape(num_tokens, flat, 1, key_width) * key_width**-0.5
    output = (query_TN1K @ states_TNKV).reshape(num_tokens, num_rows, num_heads, value_width)
    states = states_TNKV.reshape(num_tokens, num_rows, num_heads, key_width, value_width)
    return output.transpose(0, 1).to(out_dtype), states


_PER_TOKEN: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"gated_delta": gated_delta_per_token}


@contextmanager
def per_token_states(family: Family) -> Iterator[None]:
    """Make recurrent layers return the state after every token, for windows that continue an earlier state.

    A window of one token needs it no more than prefill does: both keep the stock kernels. The replacement is a module
    attribute, seen by every thread. Does nothing for a family without recurrent layers.
    """
    kernels = family.recurrent
    if kernels is None:
        yield
        return
    module = importlib.import_module(family.borrowed.python_module)
    stock = getattr(module, kernels.chunked)
    setattr(module, kernels.chunked, _PER_TOKEN[kernels.rule])
    try:
        yield
    finally:
        setattr(module, kernels.chunked, stock)
