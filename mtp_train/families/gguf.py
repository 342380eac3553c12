"""What llama.cpp must be told to load a head on its own: tensor names and metadata, one record per model type.

Read from llama.cpp's converter (``--mtp``) and loaders. Everything is keyed by the checkpoint's own names, and nothing
here needs the ``gguf`` package. A family has no record where llama.cpp has no graph for its head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.gguf_fields import (
    DECODER,
    EXPERTS,
    SIGMOID_ROUTER,
    Field,
    always,
    flag,
    full_indexers,
    only_if_true,
    product,
    real,
    recurrent_layers,
    rotated,
    router,
    sections_always,
    total,
    whole,
    yarn_log_multiplier,
)


@dataclass(frozen=True)
class Cut:
    """A native tensor that GGUF keeps as two."""

    how: Literal["halves", "latent_kv"]
    """``halves``: along the next to last axis. ``latent_kv``: a head's key part, transposed, and its value part."""
    names: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class GgufHead:
    """How the heads of some model types are named and described in GGUF."""

    arch: str
    """llama.cpp's name of the architecture, and the prefix of ``fields``."""
    pre_tokenizer: str
    """llama.cpp's name of the pre-tokenizer. Its converter knows one by a hash of what the tokenizer makes of a text,
    which fails for a tokenizer with one token more. Loaders want a name they know; a draft is made of token ids."""
    names: Mapping[str, str]
    """Native head key without its root, to the name within its block. ``{expert}``: one each, stacked."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The same for native tensors that become two."""
    fields: Mapping[str, Field]
    """Metadata. Counts of blocks and head modules are the writer's."""
    roots: tuple[str, ...] = ("{trunk}layers.{layer}.",)
    """What native head keys start with, longest first. One without a number belongs to the first module."""
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 where a checkpoint stores w and the model computes with 1 + w."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Kind of special token to its text, where the tokenizer's own files do not say it."""


TRUNK_NAMES: Mapping[str, str] = {
    "{trunk}embed_tokens.weight": "token_embd.weight",
    "{trunk}norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
"""Trunk tensors that go along because loaders insist on them; a tied lm_head is not there and not missed."""


def gguf_head_for(model_type: str, *, where: str) -> GgufHead:
    """Return the record of a text config's model type.

    Raises:
        UnsupportedModelError: There is none.
    """
    if model_type in GGUF_HEADS:
        return GGUF_HEADS[model_type]
    raise UnsupportedModelError(
        f"{where}: no GGUF layout is known for the head of model_type '{model_type}'; expected one of "
        f"{', '.join(sorted(GGUF_HEADS))}. Export without --gguf and try llama.cpp's own converter."
    )


def _weights(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{native}.weight": f"{ours}.weight" for native, ours in names.items()}


_NEXTN = _weights(
    {
        "eh_proj": "nextn.eh_proj",
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "embed_tokens": "nextn.embed_tokens",
        "shared_head.norm": "nextn.shared_head_norm",
        "shared_head.head": "nextn.shared_head_head",
    }
)
_ATTENTION = {
    **_weights(
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        }
    ),
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}
_LATENT_ATTENTION = _weights(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.o_proj": "attn_output",
    }
)
_INDEXER = {
    **_weights(
        {
            "self_attn.indexer.wq_b": "indexer.attn_q_b",
            "self_attn.indexer.wk": "indexer.attn_k",
            "self_attn.indexer.k_norm": "indexer.k_norm",
            "self_attn.indexer.weights_proj": "indexer.proj",
        }
    ),
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
}
# The norm before the feed-forward part has two names, by what stood first in llama.cpp's own model.
_POST_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
_BEFORE_FFN = {"post_attention_layernorm.weight": "ffn_norm.weight"}
_PARTS = ("gate", "up", "down")
_DENSE = {f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in _PARTS}
_EACH_EXPERT = {f"mlp.experts.{{expert}}.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in _PARTS}
_ROUTER = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **_EACH_EXPERT,
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in _PARTS},
}

_QWEN = GgufHead(
    arch="qwen35",
    pre_tokenizer="qwen35",
    roots=("mtp.layers.{module}.", "mtp."),
    names={
        **_weights(
            {
                "fc": "nextn.eh_proj",
                "pre_fc_norm_embedding": "nextn.enorm",
                "pre_fc_norm_hidden": "nextn.hnorm",
                "norm": "nextn.shared_head_norm",
            }
        ),
        **_ATTENTION,
        **_POST_ATTENTION,
        **_DENSE,
    },
    norm_offset=1.0,
    fields={
        **DECODER,
        "rope.dimension_count": rotated("head_dim", 0.25),
        "rope.dimension_sections": sections_always,
        "ssm.conv_kernel": whole("linear_conv_kernel_dim"),
        "ssm.state_size": whole("linear_key_head_dim"),
        "ssm.group_count": whole("linear_num_key_heads"),
        "ssm.time_step_rank": whole("linear_num_value_heads"),
        "ssm.inner_size": product("linear_value_head_dim", "linear_num_value_heads"),
        "attention.recurrent_layers": recurrent_layers,
        "full_attention_interval": whole("full_attention_interval", default=4),
    },
)
_QWEN_MOE = dataclasses.replace(
    _QWEN,
    arch="qwen35moe",
    names={
        **{native: ours for native, ours in _QWEN.names.items() if native not in _DENSE},
        "mlp.gate.weight": "ffn_gate_inp.weight",
        **_EACH_EXPERT,
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in _PARTS},
    },
    cuts={"mlp.experts.gate_up_proj": Cut("halves", ("ffn_gate_exps.weight", "ffn_up_exps.weight"))},
    fields={
        **_QWEN.fields,
        **EXPERTS,
        "expert_shared_feed_forward_length": whole("shared_expert_intermediate_size"),
    },
)
_QWEN3_NEXT = dataclasses.replace(
    _QWEN_MOE,
    arch="qwen3next",
    pre_tokenizer="qwen2",
    fields={**_QWEN_MOE.fields, "rope.dimension_sections": DECODER["rope.dimension_sections"]},
)

_GLM_TOKENS = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
_GLM4_MOE = GgufHead(
    arch="glm4moe",
    pre_tokenizer="glm4",
    names={**_NEXTN, **_ATTENTION, **_POST_ATTENTION, **_ROUTER},
    special_tokens=_GLM_TOKENS,
    fields={
        **DECODER,
        **EXPERTS,
        "rope.dimension_count": rotated("head_dim", 0.5),
        "expert_shared_count": whole("n_shared_experts"),
        "leading_dense_block_count": whole("first_k_dense_replace"),
        "expert_gating_func": SIGMOID_ROUTER,
        "expert_weights_scale": real("routed_scaling_factor"),
        "expert_weights_norm": flag("norm_topk_prob"),
    },
)

# Latent attention is kept as attention with one key-value head over the latent.
_LATENT = GgufHead(
    arch="deepseek2",
    pre_tokenizer="glm4",
    names={**_NEXTN, **_LATENT_ATTENTION, **_BEFORE_FFN, **_ROUTER},
    cuts={"self_attn.kv_b_proj.weight": Cut("latent_kv", ("attn_k_b.weight", "attn_v_b.weight"))},
    special_tokens=_GLM_TOKENS,
    fields={
        **DECODER,
        **EXPERTS,
        "vocab_size": whole("vocab_size"),
        "attention.head_count_kv": always(1),
        "attention.q_lora_rank": whole("q_lora_rank"),
        "attention.kv_lora_rank": whole("kv_lora_rank"),
        "attention.key_length": total("kv_lora_rank", "qk_rope_head_dim"),
        "attention.value_length": whole("kv_lora_rank"),
        "attention.key_length_mla": total("qk_nope_head_dim", "qk_rope_head_dim"),
        "attention.value_length_mla": whole("v_head_dim"),
        "rope.dimension_count": whole("qk_rope_head_dim"),
        "rope.scaling.yarn_log_multiplier": yarn_log_multiplier,
        "expert_shared_count": whole("n_shared_experts", default=0),
        "leading_dense_block_count": whole("first_k_dense_replace", default=0),
        "expert_weights_scale": real("routed_scaling_factor"),
        "expert_weights_norm": only_if_true("norm_topk_prob"),
    },
)
_SPARSE_FIELDS: Mapping[str, Field] = {
    **_LATENT.fields,
    "attention.indexer.head_count": whole("index_n_heads"),
    "attention.indexer.key_length": whole("index_head_dim"),
    "attention.indexer.top_k": whole("index_topk"),
}
_GLM_DSA = dataclasses.replace(
    _LATENT,
    arch="glm-dsa",
    names={**_LATENT.names, **_INDEXER},
    fields={
        **_SPARSE_FIELDS,
        "rope.dimension_count": rotated("qk_rope_head_dim", 1.0),
        "attention.indexer.types": full_indexers,
    },
)
_DEEPSEEK_V32 = dataclasses.replace(
    _LATENT,
    arch="deepseek32",
    pre_tokenizer="deepseek-v3",
    names={**_LATENT.names, **_INDEXER},
    special_tokens={},
    # Its loader has no function of its own to fall back on.
    fields={**_SPARSE_FIELDS, "expert_gating_func": router(default="sigmoid")},
)

_HY_V3 = GgufHead(
    arch="hy_v3",
    pre_tokenizer="hunyuan-dense",
    names={
        **_NEXTN,
        "final_layernorm.weight": "nextn.shared_head_norm.weight",
        **_ATTENTION,
        **_BEFORE_FFN,
        "mlp.router.gate.weight": "ffn_gate_inp.weight",
        "mlp.expert_bias": "exp_probs_b",
        **_EACH_EXPERT,
        **{f"mlp.shared_mlp.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in _PARTS},
    },
    fields={
        **DECODER,
        **EXPERTS,
        "expert_shared_feed_forward_length": product("moe_intermediate_size", "num_shared_experts"),
        "expert_gating_func": SIGMOID_ROUTER,
        "expert_weights_scale": real("router_scaling_factor", default=1.0),
        "expert_weights_norm": flag("route_norm", default=True),
    },
)

GGUF_HEADS: Mapping[str, GgufHead] = {
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _GLM_DSA,
    "deepseek_v32": _DEEPSEEK_V32,
    "hy_v3": _HY_V3,
}
"""Text-config model type to its record."""
