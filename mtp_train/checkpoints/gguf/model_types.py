"""The registry of GGUF records by model type, with the records of Qwen, GLM, DeepSeek and Hunyuan.

A record has everything llama.cpp needs to load a head as a file of its own: tensor names and metadata. A model type has
no record if llama.cpp has no graph for its head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mtp_train.checkpoints.gguf.fields import (
    DECODER,
    EXPERTS,
    NUM_MODULES,
    SIGMOID_ROUTER,
    Field,
    Value,
    always,
    flag,
    full_indexers,
    only_if_true,
    product,
    real,
    recurrent_layers,
    rope_scaling,
    rotated,
    router,
    sections_always,
    total,
    whole,
    yarn_log_multiplier,
)
from mtp_train.checkpoints.gguf.head_record import (
    ATTENTION,
    BEFORE_FFN,
    DENSE,
    EACH_EXPERT,
    INDEXER,
    LATENT_ATTENTION,
    NEXTN,
    PARTS,
    POST_ATTENTION,
    ROUTER,
    Cut,
    GgufHead,
    Join,
    weights,
)
from mtp_train.checkpoints.gguf.mixed_layers import MIXED
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.spec import Family, RawConfig

_EXPERTS_OF = {"gate": "w1", "down": "w2", "up": "w3"}
_MIXING = ("fn", "base", "scale")


# Only layers with compressed keys scale their rotary embedding. They have no attention factor, although transformers
# adds one to the config.
_STRETCHED = {
    name: field for name, field in rope_scaling("compress").items() if name != "rope.scaling.yarn_attn_factor"
}


def _ratios(config: RawConfig) -> Value:
    """List the compression rate of each block's attention; 0 for no compression, as in all head modules."""
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    return [*(rates[kind] for kind in config["layer_types"]), *[0] * config[NUM_MODULES]]


def _bounds(config: RawConfig) -> Value:
    return [float(config["swiglu_limit"])] * (config["num_hidden_layers"] + config[NUM_MODULES])


def _by_token(config: RawConfig) -> Value:
    """Count the first layers, which route by token id."""
    return list(config["mlp_layer_types"]).count("hash_moe")


_DEEPSEEK_V4 = GgufHead(
    arch="deepseek4",
    pre_tokenizer="joyai-llm",
    roots=("mtp.{module}.",),
    names={
        **weights(
            {
                "enorm": "nextn.enorm",
                "hnorm": "nextn.hnorm",
                "norm": "nextn.shared_head_norm",
                # Releases share these two with the trunk. The converter has no name for them, but the loader has.
                "emb.tok_emb": "nextn.embed_tokens",
                "head": "nextn.shared_head_head",
                "attn_norm": "attn_norm",
                "attn.wq_a": "attn_q_a",
                "attn.q_norm": "attn_q_a_norm",
                "attn.wq_b": "attn_q_b",
                "attn.wkv": "attn_kv",
                "attn.kv_norm": "attn_kv_a_norm",
                "attn.wo_a": "attn_output_a",
                "attn.wo_b": "attn_output_b",
                "ffn_norm": "ffn_norm",
                "ffn.gate": "ffn_gate_inp",
                **{f"ffn.shared_experts.{theirs}": f"ffn_{ours}_shexp" for ours, theirs in _EXPERTS_OF.items()},
                **{f"ffn.experts.{{expert}}.{theirs}": f"ffn_{ours}_exps" for ours, theirs in _EXPERTS_OF.items()},
            }
        ),
        "attn.attn_sink": "attn_sinks.weight",
        "ffn.gate.bias": "exp_probs_b.bias",
        **{f"hc_{part}_{one}": f"hc_{part}_{one}.weight" for part in ("attn", "ffn") for one in _MIXING},
    },
    outside={f"hc_head_{one}": f"output_hc_{one}.weight" for one in _MIXING},
    joined={"nextn.eh_proj.weight": Join(1, ("e_proj.weight", "h_proj.weight"))},
    fields={
        **DECODER,
        **EXPERTS,
        "embedding_length_out": product("hidden_size", "hc_mult"),
        "attention.q_lora_rank": whole("q_lora_rank"),
        "attention.sliding_window": whole("sliding_window"),
        "attention.indexer.head_count": whole("index_n_heads"),
        "attention.indexer.key_length": whole("index_head_dim"),
        "attention.indexer.top_k": whole("index_topk"),
        "attention.output_group_count": whole("o_groups"),
        "attention.output_lora_rank": whole("o_lora_rank"),
        "attention.compress_ratios": _ratios,
        "attention.compress_rope_freq_base": real("compress_rope_theta"),
        **_STRETCHED,
        "rope.freq_base": real("rope_theta"),
        "rope.dimension_count": whole("qk_rope_head_dim"),
        "expert_shared_count": whole("n_shared_experts"),
        "expert_weights_scale": real("routed_scaling_factor"),
        "expert_weights_norm": flag("norm_topk_prob"),
        "swiglu_clamp_exp": _bounds,
        "swiglu_clamp_shexp": _bounds,
        "hyper_connection.count": whole("hc_mult"),
        "hyper_connection.sinkhorn_iterations": whole("hc_sinkhorn_iters"),
        "hyper_connection.epsilon": real("hc_eps"),
        "hash_layer_count": _by_token,
    },
)

STREAMS: Mapping[str, GgufHead] = {"deepseek_v4": _DEEPSEEK_V4}
"""Text-config model type to its record."""


def gguf_head_for(family: Family, model_type: str, *, where: str) -> GgufHead:
    """Return the record of a text config's model type.

    Raises:
        UnsupportedModelError: The model type has no record.
    """
    if model_type not in GGUF_HEADS:
        reason = family.serving["llama.cpp"].text
        raise UnsupportedModelError(
            f"{where}: llama.cpp does not draft with a head of {family.title}: {reason}; expected one of "
            f"{', '.join(GGUF_HEADS)}. Export without --gguf, for another engine."
        )
    return GGUF_HEADS[model_type]


_QWEN = GgufHead(
    arch="qwen35",
    pre_tokenizer="qwen35",
    roots=("mtp.layers.{module}.", "mtp."),
    names={
        **weights(
            {
                "fc": "nextn.eh_proj",
                "pre_fc_norm_embedding": "nextn.enorm",
                "pre_fc_norm_hidden": "nextn.hnorm",
                "norm": "nextn.shared_head_norm",
            }
        ),
        **ATTENTION,
        **POST_ATTENTION,
        **DENSE,
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
        **{native: ours for native, ours in _QWEN.names.items() if native not in DENSE},
        "mlp.gate.weight": "ffn_gate_inp.weight",
        **EACH_EXPERT,
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        **{f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in PARTS},
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
    names={**NEXTN, **ATTENTION, **POST_ATTENTION, **ROUTER},
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

# GGUF describes latent attention as attention with one key-value head over the latent.
_LATENT = GgufHead(
    arch="deepseek2",
    pre_tokenizer="glm4",
    names={**NEXTN, **LATENT_ATTENTION, **BEFORE_FFN, **ROUTER},
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
_DEEPSEEK_V3 = dataclasses.replace(
    _LATENT,
    pre_tokenizer="deepseek-v3",
    special_tokens={},
    # Without the field the loader assumes DeepSeek V2's router.
    fields={**_LATENT.fields, "expert_gating_func": router(default="sigmoid")},
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
    names={**_LATENT.names, **INDEXER},
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
    names={**_LATENT.names, **INDEXER},
    special_tokens={},
    # The loader has no default router function.
    fields={**_SPARSE_FIELDS, "expert_gating_func": router(default="sigmoid")},
)

_HY_V3 = GgufHead(
    arch="hy_v3",
    pre_tokenizer="hunyuan-dense",
    names={
        **NEXTN,
        "final_layernorm.weight": "nextn.shared_head_norm.weight",
        **ATTENTION,
        **BEFORE_FFN,
        "mlp.router.gate.weight": "ffn_gate_inp.weight",
        "mlp.expert_bias": "exp_probs_b",
        **EACH_EXPERT,
        **{f"mlp.shared_mlp.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in PARTS},
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
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "hy_v3": _HY_V3,
    **MIXED,
    **STREAMS,
}
"""Text-config model type to its record."""
