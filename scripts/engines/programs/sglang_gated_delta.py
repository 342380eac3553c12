"""Let SGLang verify drafts over Gated DeltaNet layers on a CPU; SGLang 0.5.23 supports it on GPUs only.

For verification, the layers keep the state after every draft, and the state after the last accepted draft becomes the
current one. On a GPU, one kernel does this. Here SGLang's CPU kernels for one token run once per draft, on a copy of
the state. SGLang itself chooses the state to keep, and its torch code copies it
(``fused_mamba_state_scatter_with_mask`` "only supports CUDA/XPU tensors"). Only one text at a time is supported, with a
chain of drafts.
"""

from functools import partial

import torch
from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton


def install():
    """Replace SGLang's functions without a CPU implementation, in this process."""
    gdn_backend.causal_conv1d_update = partial(convolve, gdn_backend.causal_conv1d_update)
    gdn_triton.fused_sigmoid_gating_delta_rule_update = partial(
        update, gdn_triton.fused_sigmoid_gating_delta_rule_update
    )
    scatter.fused_mamba_state_scatter_with_mask = HybridLinearAttnBackend._scatter_speculative_state_with_mask
    scatter.fused_conv_window_scatter_with_mask = HybridLinearAttnBackend._scatter_speculative_state_with_mask


def convolve(one_token, mixed, states, weights, bias, activation, *, conv_state_indices, **verifying):
    """Convolve tokens; in verification, store the window after each token and keep the state unchanged."""
    options = {"conv_state_indices": conv_state_indices}
    if not verifying:
        return one_token(mixed, states, weights, bias, activation, **options)
    require_chain(verifying)
    (place,) = conv_state_indices.tolist()
    (row,) = verifying["intermediate_state_indices"].tolist()
    before, outputs = states[place].clone(), []
    for step, token in enumerate(mixed.unbind(dim=2)):
        outputs.append(one_token(token.contiguous(), states, weights, bias, activation, **options))
        verifying["intermediate_conv_window"][row, step] = states[place]
    states[place] = before
    return torch.stack(outputs, dim=2)


def update(one_token, *, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **options):
    """Run the recurrence; in verification, store the state after each token and keep the initial state unchanged."""
    states = options.pop("intermediate_states_buffer", None)
    if states is None:
        source = {"initial_state_source": initial_state_source, "initial_state_indices": initial_state_indices}
        return one_token(q=q, k=k, v=v, a=a, b=b, **source, cu_seqlens=cu_seqlens, **options)
    require_chain(options)
    (row, *_) = options.pop("intermediate_state_indices").tolist()
    for name in ("is_kda", "disable_state_update", "cache_steps", "retrieve_parent_token"):
        options.pop(name)
    state = initial_state_source[initial_state_indices[:1].long()].contiguous()
    outputs = []
    for step in range(q.shape[1]):
        parts = {name: value[:, step : step + 1].contiguous() for name, value in {"q": q, "k": k, "v": v}.items()}
        gates = {name: value.reshape(q.shape[1], -1)[step : step + 1] for name, value in {"a": a, "b": b}.items()}
        outputs.append(
            one_token(
                **parts,
                **gates,
                initial_state_source=state,
                initial_state_indices=torch.zeros_like(initial_state_indices[:1]),
                cu_seqlens=torch.arange(2, dtype=cu_seqlens.dtype),
                **options,
            )
        )
        states[row, step] = state[0]
    return torch.cat(outputs, dim=1)


def require_chain(verifying):
    """Check that the drafts form a chain.

    Raises:
        NotImplementedError: The drafts form a tree.
    """
    if verifying["retrieve_parent_token"] is not None:
        raise NotImplementedError("drafts that are a tree; expected a chain: speculative_eagle_topk=1")
