"""GGUF records of trunks with several layer types: MiMo-V2, Step, Nemotron 3, Ling 3 and Command A+.

Many fields are one value in these configs and a list in GGUF, with one value per block, head modules included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtp_train.checkpoints.gguf.fields import (
    DECODER,
    EXPERTS,
    NUM_MODULES,
    Field,
    Value,
    always,
    either,
    flag,
    limits,
    product,
    real,
    rope_of,
    rotated,
    router,
    total,
    whole,
    window_theta,
)
from mtp_train.checkpoints.gguf.head_record import (
    ATTENTION,
    BEFORE_FFN,
    DENSE,
    LATENT_ATTENTION,
    NEXTN,
    PARTS,
    ROUTER,
    Cut,
    GgufHead,
    Join,
    weights,
)
from mtp_train.families.spec import RawConfig

_SLIDING = "sliding_attention"


def _kinds(config: RawConfig) -> list[str]:
    """Return the attention type of each block."""
    modules = list(config.get("mtp_layer_types") or [_SLIDING] * config[NUM_MODULES])
    return [*config["layer_types"], *modules[: config[NUM_MODULES]]]


# Releases have rope_theta outside of the rotary parameters, where transformers may ignore it.
_THETA = either(real("rope_theta"), DECODER["rope.freq_base"])

# MiMo-V2


def _mimo_windows(config: RawConfig) -> list[int]:
    """List for each block whether it has a sliding window; head modules have one."""
    pattern = config.get("hybrid_layer_pattern") or [int(kind == _SLIDING) for kind in config["layer_types"]]
    return [*pattern, *[1] * config[NUM_MODULES]]


def _mimo_key_heads(config: RawConfig) -> Value:
    full = config["num_key_value_heads"]
    # transformers' sliding layers always have twice the number of key heads.
    sliding = config.get("swa_num_key_value_heads", 2 * full)
    return [sliding if window else full for window in _mimo_windows(config)]


_QKV = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
_MIMO_V2 = GgufHead(
    arch="mimo2",
    pre_tokenizer="qwen2",
    roots=("model.mtp.layers.{module}.",),
    names={
        **NEXTN,
        "final_layernorm.weight": "layer_output_norm.weight",
        **{native: ours for native, ours in ATTENTION.items() if native not in _QKV},
        "self_attn.attention_sink_bias": "attn_sinks.weight",
        "pre_mlp_layernorm.weight": "ffn_norm.weight",
        **DENSE,
    },
    # llama.cpp's graph aborts on separate query, key and value matrices, and its converter does not join them.
    joined={"attn_qkv.weight": Join(0, _QKV)},
    fields={
        **DECODER,
        **EXPERTS,
        "attention.head_count_kv": _mimo_key_heads,
        "attention.value_length": whole("v_head_dim"),
        "attention.value_scale": real("attention_value_scale"),
        "attention.layer_norm_rms_epsilon": real("layernorm_epsilon", "rms_norm_eps"),
        # The release's number excludes the row itself, which transformers adds to the window.
        "attention.sliding_window": whole("sliding_window_size", "sliding_window"),
        "attention.sliding_window_pattern": _mimo_windows,
        "rope.freq_base": _THETA,
        "rope.freq_base_swa": either(real("swa_rope_theta"), window_theta),
        "rope.dimension_count": rotated("head_dim", 0.334),
    },
)

# Step-3.5


def _step_heads(config: RawConfig) -> Value:
    full, sliding = config["num_attention_heads"], config["num_sliding_attention_heads"]
    return [sliding if kind == _SLIDING else full for kind in _kinds(config)]


def _step_key_heads(config: RawConfig) -> Value:
    return [config["num_key_value_heads"]] * len(_kinds(config))


def _step_windows(config: RawConfig) -> Value:
    return [kind == _SLIDING for kind in _kinds(config)]


def _step_first_sparse(config: RawConfig) -> Value:
    kinds = config["mlp_layer_types"]
    return kinds.index("sparse") if "sparse" in kinds else 0


def _is_llama3(config: RawConfig) -> bool:
    return rope_of(config).get("rope_type") == "llama3"


def _step_rope_type(config: RawConfig) -> Value | None:
    return None if _is_llama3(config) else DECODER["rope.scaling.type"](config)


def _llama3_factors(config: RawConfig) -> list[float] | None:
    """Return the divisors of full attention's rotary frequencies; 1 for dimensions without rotation."""
    if not _is_llama3(config):
        return None
    rope, size = rope_of(config), int(config["head_dim"])
    rotated_dims = int(size * rope.get("partial_rotary_factor", 0.5))
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    old_context = int(rope["original_max_position_embeddings"])

    def factor_of(dim: int) -> float:
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (dim / rotated_dims)
        # 0 for wavelengths that are long in the old context (fully scaled), 1 for short ones (not scaled).
        smooth = min(1.0, max(0.0, (old_context / wavelength - low) / (high - low)))
        return 1 / ((1 - smooth) / factor + smooth)

    scaled = [factor_of(dim) for dim in range(0, rotated_dims, 2)]
    return scaled + [1.0] * (size // 2 - len(scaled))


_STEP = GgufHead(
    arch="step35",
    pre_tokenizer="deepseek-v3",
    names={
        **NEXTN,
        "transformer.shared_head.norm.weight": "nextn.shared_head_norm.weight",
        "transformer.shared_head.output.weight": "nextn.shared_head_head.weight",
        **ATTENTION,
        "self_attn.g_proj.weight": "attn_gate.weight",
        **BEFORE_FFN,
        **DENSE,
        "moe.gate.weight": "ffn_gate_inp.weight",
        "moe.router_bias": "exp_probs_b.bias",
        **{f"moe.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in PARTS},
        **{f"share_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in PARTS},
    },
    norm_offset=1.0,
    generated={"rope_freqs.weight": _llama3_factors},
    fields={
        **DECODER,
        **EXPERTS,
        "attention.head_count": _step_heads,
        "attention.head_count_kv": _step_key_heads,
        "attention.sliding_window": whole("sliding_window"),
        "attention.sliding_window_pattern": _step_windows,
        "expert_shared_feed_forward_length": whole("share_expert_dim"),
        "expert_weights_scale": real("moe_router_scaling_factor"),
        "expert_weights_norm": flag("norm_expert_weight"),
        "leading_dense_block_count": _step_first_sparse,
        "moe_every_n_layers": whole("moe_every_n_layer", default=1),
        "rope.freq_base_swa": window_theta,
        "rope.scaling.type": _step_rope_type,
        "swiglu_clamp_exp": limits("swiglu_limits"),
        "swiglu_clamp_shexp": limits("swiglu_limits_shared"),
    },
)

# Nemotron 3


def _nemotron_blocks(kind: str, field: str) -> Field:
    """Read a number for blocks of one type, 0 for other blocks; the head's block has both types."""

    def read(config: RawConfig) -> Value:
        return [config[field] if found in (kind, "head") else 0 for found in [*config["layers_block_type"], "head"]]

    return read


# llama.cpp's graph of the head is attention, then experts. Its converter rounds this architecture's router, apparently
# by oversight; here it is written in fp32, like the converter writes all other routers.
_ATTENTION, _EXPERTS = "layers.0.", "layers.1."
_NEMOTRON = GgufHead(
    arch="nemotron_h_moe",
    pre_tokenizer="pixtral",
    roots=("mtp.",),
    names={
        **weights(
            {
                f"{_ATTENTION}eh_proj": "nextn.eh_proj",
                f"{_ATTENTION}enorm": "nextn.enorm",
                f"{_ATTENTION}hnorm": "nextn.hnorm",
                f"{_EXPERTS}final_layernorm": "nextn.shared_head_norm",
                f"{_ATTENTION}norm": "attn_norm",
                f"{_ATTENTION}mixer.v_proj": "attn_v",
                f"{_ATTENTION}mixer.o_proj": "attn_output",
                f"{_EXPERTS}norm": "post_attention_norm",
                f"{_EXPERTS}mixer.gate": "ffn_gate_inp",
                f"{_EXPERTS}mixer.experts.{{expert}}.up_proj": "ffn_up_exps",
                f"{_EXPERTS}mixer.experts.{{expert}}.down_proj": "ffn_down_exps",
                f"{_EXPERTS}mixer.shared_experts.up_proj": "ffn_up_shexp",
                f"{_EXPERTS}mixer.shared_experts.down_proj": "ffn_down_shexp",
                f"{_EXPERTS}mixer.fc1_latent_proj": "ffn_latent_down",
                f"{_EXPERTS}mixer.fc2_latent_proj": "ffn_latent_up",
            }
        ),
        f"{_EXPERTS}mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    },
    # The row order of a rotary embedding. This attention has none, so any order works that both matrices share.
    cuts={
        f"{_ATTENTION}mixer.q_proj.weight": Cut("query_pairs", ("attn_q.weight",)),
        f"{_ATTENTION}mixer.k_proj.weight": Cut("key_pairs", ("attn_k.weight",)),
    },
    fields={
        **DECODER,
        **EXPERTS,
        "vocab_size": whole("vocab_size"),
        "context_length": always(1 << 20),
        "feed_forward_length": _nemotron_blocks("moe", "moe_intermediate_size"),
        "attention.head_count_kv": _nemotron_blocks("full_attention", "num_key_value_heads"),
        "attention.layer_norm_epsilon": real("layer_norm_epsilon"),
        "attention.layer_norm_rms_epsilon": real("norm_eps"),
        "rope.freq_base": _THETA,
        "rope.dimension_count": whole("head_dim"),
        "rope.scaling.finetuned": always(False),
        "ssm.conv_kernel": whole("conv_kernel"),
        "ssm.state_size": whole("ssm_state_size"),
        "ssm.group_count": whole("n_groups"),
        "ssm.inner_size": product("mamba_num_heads", "mamba_head_dim"),
        "ssm.time_step_rank": whole("mamba_num_heads"),
        "expert_shared_count": whole("n_shared_experts"),
        "expert_shared_feed_forward_length": whole("moe_shared_expert_intermediate_size"),
        "expert_weights_norm": flag("norm_topk_prob"),
        "expert_weights_scale": real("routed_scaling_factor"),
        "moe_latent_size": whole("moe_latent_size"),
    },
)

# Ling 3


def _ling_key_heads(config: RawConfig) -> Value:
    """List 1 for latent attention (all heads share one latent) and 0 for layers with a recurrent state."""
    return [int(kind == "full_attention") for kind in config["layer_types"]] + [1] * config[NUM_MODULES]


_LING_NAMES = {native.replace("self_attn.", "attention."): ours for native, ours in LATENT_ATTENTION.items()}
_LING = GgufHead(
    arch="bailingmoe3",
    pre_tokenizer="bailingmoe2",
    names={
        **NEXTN,
        "final_layernorm.weight": "layer_output_norm.weight",
        **_LING_NAMES,
        "attention.dense.weight": "attn_output.weight",
        "attention.g_proj.weight": "attn_gate.weight",
        **BEFORE_FFN,
        **ROUTER,
        "mlp.gate.expert_bias": "exp_probs_b.bias",
    },
    cuts={"attention.kv_b_proj.weight": Cut("latent_kv", ("attn_k_b.weight", "attn_v_b.weight"))},
    fields={
        **DECODER,
        **EXPERTS,
        "vocab_size": whole("vocab_size"),
        "context_length": whole("max_position_embeddings", "model_max_length"),
        "attention.head_count_kv": _ling_key_heads,
        "attention.q_lora_rank": whole("q_lora_rank"),
        "attention.kv_lora_rank": whole("kv_lora_rank"),
        "attention.key_length": total("kv_lora_rank", "qk_rope_head_dim"),
        # In transformers head_dim is the number of the latent attention's rotary dimensions.
        "attention.value_length": whole("linear_head_dim"),
        "attention.key_length_mla": total("qk_nope_head_dim", "qk_rope_head_dim"),
        "attention.value_length_mla": whole("v_head_dim"),
        "rope.dimension_count": whole("qk_rope_head_dim"),
        "ssm.conv_kernel": whole("short_conv_kernel_size"),
        "kda.head_dim": whole("linear_head_dim"),
        "kda.safe_gate": flag("kda_safe_gate"),
        "kda.gate_lower_bound": real("kda_lower_bound"),
        "expert_used_count": whole("num_experts_per_tok", "num_experts_per_token"),
        "expert_group_count": whole("n_group", "num_expert_group"),
        "expert_shared_count": whole("num_shared_experts"),
        "expert_shared_feed_forward_length": either(
            whole("moe_shared_expert_intermediate_size"), product("moe_intermediate_size", "num_shared_experts")
        ),
        "expert_gating_func": router(default="sigmoid"),
        "expert_weights_scale": real("routed_scaling_factor"),
        "expert_weights_norm": flag("norm_topk_prob", "moe_renormalize"),
        "leading_dense_block_count": whole("first_k_dense_replace"),
        "swiglu_clamp_exp": limits("expert_swiglu_limit_list"),
        "swiglu_clamp_shexp": limits("share_expert_swiglu_limit_list"),
    },
)

# Command A+


def _command_windows(config: RawConfig) -> Value:
    # Like the converter, list the trunk's layers only: a head module attends to all keys.
    return [kind == _SLIDING for kind in config["layer_types"]]


def _command_first_sparse(config: RawConfig) -> Value:
    kinds = config["mlp_layer_types"]
    return next((index for index, kind in enumerate(kinds) if kind != "dense"), len(kinds))


def _if_shared(field: Field) -> Field:
    return lambda config: field(config) if config["num_shared_experts"] else None


_COMMAND = GgufHead(
    arch="cohere2moe",
    pre_tokenizer="cohere2moe",
    names={**NEXTN, **ATTENTION, **ROUTER},
    fields={
        **DECODER,
        **EXPERTS,
        "vocab_size": whole("vocab_size"),
        "logit_scale": real("logit_scale"),
        "feed_forward_length": either(whole("prefix_dense_intermediate_size"), whole("intermediate_size")),
        "attention.layer_norm_epsilon": real("layer_norm_eps"),
        "attention.sliding_window": whole("sliding_window"),
        "attention.sliding_window_pattern": _command_windows,
        "rope.dimension_count": whole("head_dim"),
        "rope.scaling.type": always("none"),
        "leading_dense_block_count": _command_first_sparse,
        "expert_feed_forward_length": whole("intermediate_size"),
        "expert_shared_count": _if_shared(whole("num_shared_experts")),
        "expert_shared_feed_forward_length": _if_shared(product("intermediate_size", "num_shared_experts")),
        "expert_weights_norm": flag("norm_topk_prob"),
    },
)

MIXED: Mapping[str, GgufHead] = {
    "mimo_v2_flash": _MIMO_V2,
    "step3p5": _STEP,
    "nemotron_h": _NEMOTRON,
    "bailing_hybrid": _LING,
    "cohere2_moe": _COMMAND,
}
"""Text-config model type to its record."""
