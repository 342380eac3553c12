"""GGUF records of heads by model type.

A record has everything llama.cpp needs to load a head as a file of its own: tensor names and metadata. A model type has
no record if llama.cpp has no graph for its head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from transformers import LlamaConfig

from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.gguf.record import (
    AT_THE_END,
    BEFORE_FFN,
    FIELDS,
    LATENT_FIELDS,
    LM_HEAD_NAME,
    NAMES,
    NUM_MODULES,
    POST_ATTENTION,
    SIGMOID_ROUTER,
    Cut,
    Field,
    GgufHead,
    Join,
    Value,
    always,
    either,
    flag,
    limits,
    of_kind,
    product,
    real,
    rope_of,
    rope_scaling,
    rope_value,
    rotated,
    router,
    whole,
)
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.layouts import weights
from mtp_train.families.spec import RawConfig
from mtp_train.upstream.transformers_private import ROPE_INIT_FUNCTIONS

_SLIDING = "sliding_attention"


def _kinds(config: RawConfig) -> list[str]:
    modules = config.get("mtp_layer_types") or [_SLIDING] * config[NUM_MODULES]
    return [*config["layer_types"], *modules[: config[NUM_MODULES]]]


# Releases have rope_theta outside of the rotary parameters, where transformers may ignore it.
_THETA = either(real("rope_theta"), FIELDS["rope.freq_base"])

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


# Step-3.5


def _is_llama3(config: RawConfig) -> bool:
    return rope_of(config).get("rope_type") == "llama3"


def _llama3_factors(config: RawConfig) -> list[float] | None:
    """Return the divisors of full attention's rotary frequencies; 1 for dimensions without rotation."""
    if not _is_llama3(config):
        return None
    rope = rope_of(config)
    size = int(config["head_dim"])
    rotating = LlamaConfig(
        head_dim=int(size * rope.get("partial_rotary_factor", 0.5)),
        rope_parameters={**rope, "partial_rotary_factor": 1.0},
        # transformers warns of a context that is no longer than the old one, and does not read it here.
        max_position_embeddings=2 * rope["original_max_position_embeddings"],
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](rotating)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(len(scaled)) / len(scaled))
    return [*(plain / scaled).tolist(), *[1.0] * (size // 2 - len(scaled))]


# Nemotron 3


def _nemotron_blocks(kind: str, field: str) -> Field:
    """Read a number for blocks of one type, 0 for other blocks; the head's block has both types."""
    return lambda config: [
        config[field] if found in (kind, "head") else 0 for found in [*config["layers_block_type"], "head"]
    ]


# Command A+


def _if_shared(field: Field) -> Field:
    return lambda config: field(config) if config["num_shared_experts"] else None


# DeepSeek V4

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


# Records that others are made from

_QWEN = GgufHead(
    arch="qwen35",
    pre_tokenizer="qwen35",
    names={**NAMES, **POST_ATTENTION},
    norm_offset=1.0,
    fields={
        **FIELDS,
        "rope.dimension_count": rotated("head_dim", 0.25),
        # Its loader requires the field.
        "rope.dimension_sections": either(FIELDS["rope.dimension_sections"], always([11, 11, 10, 0])),
        "ssm.time_step_rank": whole("linear_num_value_heads"),
        "ssm.inner_size": product("linear_value_head_dim", "linear_num_value_heads"),
        "attention.recurrent_layers": of_kind("linear_attention", modules=False),
        "full_attention_interval": whole("full_attention_interval", default=4),
    },
)
_QWEN_MOE = dataclasses.replace(
    _QWEN,
    arch="qwen35moe",
    fields={**_QWEN.fields, "expert_shared_feed_forward_length": whole("shared_expert_intermediate_size")},
)

_GLM_TOKENS = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}

_LATENT = GgufHead(
    arch="deepseek2",
    pre_tokenizer="glm4",
    names={**NAMES, **BEFORE_FFN},
    special_tokens=_GLM_TOKENS,
    fields={
        **FIELDS,
        **LATENT_FIELDS,
        "attention.head_count_kv": always(1),
        "attention.value_length": whole("kv_lora_rank"),
        "rope.scaling.yarn_log_multiplier": rope_value("mscale_all_dim", kind=lambda scale: 0.1 * float(scale)),
        "expert_shared_count": whole("n_shared_experts", default=0),
        "leading_dense_block_count": whole("first_k_dense_replace", default=0),
        "expert_weights_norm": lambda config: True if config.get("norm_topk_prob") else None,
    },
)
_DEEPSEEK_V3 = dataclasses.replace(
    _LATENT,
    pre_tokenizer="deepseek-v3",
    special_tokens={},
    # Without the field the loader assumes DeepSeek V2's router, or for V3.2 none.
    fields={**_LATENT.fields, "expert_gating_func": router(default="sigmoid")},
)


GGUF_HEADS: Mapping[str, GgufHead] = {
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN_MOE,
    "qwen3_next": dataclasses.replace(
        _QWEN_MOE,
        arch="qwen3next",
        pre_tokenizer="qwen2",
        fields={**_QWEN_MOE.fields, "rope.dimension_sections": FIELDS["rope.dimension_sections"]},
    ),
    "glm4_moe": GgufHead(
        arch="glm4moe",
        pre_tokenizer="glm4",
        names={**NAMES, **POST_ATTENTION},
        special_tokens=_GLM_TOKENS,
        fields={
            **FIELDS,
            "rope.dimension_count": rotated("head_dim", 0.5),
            "expert_gating_func": SIGMOID_ROUTER,
            "expert_weights_norm": flag("norm_topk_prob"),
        },
    ),
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": dataclasses.replace(
        _LATENT,
        arch="glm-dsa",
        fields={
            **_LATENT.fields,
            "rope.dimension_count": rotated("qk_rope_head_dim", 1.0),
            "attention.indexer.types": of_kind("full", "indexer_types"),
        },
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": dataclasses.replace(_DEEPSEEK_V3, arch="deepseek32"),
    "hy_v3": GgufHead(
        arch="hy_v3",
        pre_tokenizer="hunyuan-dense",
        names={**NAMES, **BEFORE_FFN, "layer.mlp.e_score_correction_bias": "exp_probs_b"},
        fields={
            **FIELDS,
            "expert_shared_feed_forward_length": product("moe_intermediate_size", "num_shared_experts"),
            "expert_gating_func": SIGMOID_ROUTER,
            "expert_weights_scale": real("router_scaling_factor", default=1.0),
            "expert_weights_norm": flag("route_norm", default=True),
        },
    ),
    "mimo_v2_flash": GgufHead(
        arch="mimo2",
        pre_tokenizer="qwen2",
        names={**NAMES, **BEFORE_FFN, **AT_THE_END},
        # llama.cpp's graph aborts on separate query, key and value matrices, and its converter does not join them.
        joined={"attn_qkv.weight": Join(0, tuple(f"layer.self_attn.{part}_proj.weight" for part in "qkv"))},
        fields={
            **FIELDS,
            "attention.head_count_kv": _mimo_key_heads,
            "attention.value_length": whole("v_head_dim"),
            "attention.value_scale": real("attention_value_scale"),
            "attention.layer_norm_rms_epsilon": real("layernorm_epsilon", "rms_norm_eps"),
            # The release's number excludes the row itself, which transformers adds to the window.
            "attention.sliding_window": whole("sliding_window_size", "sliding_window"),
            "attention.sliding_window_pattern": _mimo_windows,
            "rope.freq_base": _THETA,
            "rope.freq_base_swa": either(real("swa_rope_theta"), rope_value("rope_theta", of=_SLIDING)),
            "rope.dimension_count": rotated("head_dim", 0.334),
        },
    ),
    "step3p5": GgufHead(
        arch="step35",
        pre_tokenizer="deepseek-v3",
        names={**NAMES, **BEFORE_FFN, "lm_head.weight": LM_HEAD_NAME},
        norm_offset=1.0,
        generated={"rope_freqs.weight": _llama3_factors},
        fields={
            **FIELDS,
            "attention.head_count": lambda config: [
                config["num_sliding_attention_heads" if kind == _SLIDING else "num_attention_heads"]
                for kind in _kinds(config)
            ],
            "attention.head_count_kv": lambda config: [config["num_key_value_heads"]] * len(_kinds(config)),
            "attention.sliding_window_pattern": lambda config: [kind == _SLIDING for kind in _kinds(config)],
            "expert_shared_feed_forward_length": whole("share_expert_dim"),
            "expert_weights_scale": real("moe_router_scaling_factor"),
            "expert_weights_norm": flag("norm_expert_weight"),
            "leading_dense_block_count": lambda config: (
                config["mlp_layer_types"].index("sparse") if "sparse" in config["mlp_layer_types"] else 0
            ),
            "moe_every_n_layers": whole("moe_every_n_layer", default=1),
            "rope.freq_base_swa": rope_value("rope_theta", of=_SLIDING),
            "rope.scaling.type": lambda config: None if _is_llama3(config) else FIELDS["rope.scaling.type"](config),
            "swiglu_clamp_exp": limits("swiglu_limits"),
            "swiglu_clamp_shexp": limits("swiglu_limits_shared"),
        },
    ),
    # llama.cpp's graph of the head is attention (layers.0), then experts (layers.1). Its converter rounds this
    # architecture's router, apparently by oversight; here it is written in fp32, like the converter writes all other
    # routers.
    "nemotron_h": GgufHead(
        arch="nemotron_h_moe",
        pre_tokenizer="pixtral",
        names={
            **NAMES,
            **weights(
                {
                    "layer.layers.0.norm": "attn_norm",
                    "layer.layers.0.mixer.v_proj": "attn_v",
                    "layer.layers.0.mixer.o_proj": "attn_output",
                    "layer.layers.1.norm": "post_attention_norm",
                    "layer.layers.1.mixer.gate": "ffn_gate_inp",
                    "layer.layers.1.mixer.shared_experts.up_proj": "ffn_up_shexp",
                    "layer.layers.1.mixer.shared_experts.down_proj": "ffn_down_shexp",
                    "layer.layers.1.mixer.fc1_latent_proj": "ffn_latent_down",
                    "layer.layers.1.mixer.fc2_latent_proj": "ffn_latent_up",
                }
            ),
            "layer.layers.1.mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
            "layer.layers.1.mixer.experts.up_proj": "ffn_up_exps.weight",
            "layer.layers.1.mixer.experts.down_proj": "ffn_down_exps.weight",
            # The row order of a rotary embedding. This attention has none, so any order works that both matrices share.
            "layer.layers.0.mixer.q_proj.weight": Cut("num_attention_heads", ("attn_q.weight",)),
            "layer.layers.0.mixer.k_proj.weight": Cut("num_key_value_heads", ("attn_k.weight",)),
        },
        fields={
            **FIELDS,
            "vocab_size": whole("vocab_size"),
            "context_length": always(1 << 20),
            "feed_forward_length": _nemotron_blocks("moe", "moe_intermediate_size"),
            "attention.head_count_kv": _nemotron_blocks("full_attention", "num_key_value_heads"),
            "attention.layer_norm_rms_epsilon": real("norm_eps"),
            "rope.freq_base": _THETA,
            "rope.dimension_count": whole("head_dim"),
            "rope.scaling.finetuned": always(False),
            "ssm.inner_size": product("mamba_num_heads", "mamba_head_dim"),
            "ssm.time_step_rank": whole("mamba_num_heads"),
            "expert_shared_feed_forward_length": whole("moe_shared_expert_intermediate_size"),
            "expert_weights_norm": flag("norm_topk_prob"),
            "moe_latent_size": whole("moe_latent_size"),
        },
    ),
    "bailing_hybrid": GgufHead(
        arch="bailingmoe3",
        pre_tokenizer="bailingmoe2",
        names={**NAMES, **BEFORE_FFN, **AT_THE_END},
        fields={
            **FIELDS,
            **LATENT_FIELDS,
            "context_length": whole("max_position_embeddings", "model_max_length"),
            # 1 for latent attention, where all heads share one latent, and 0 for layers with a recurrent state.
            "attention.head_count_kv": lambda config: [
                *(int(kind == "full_attention") for kind in config["layer_types"]),
                *[1] * config[NUM_MODULES],
            ],
            # In transformers head_dim is the number of the latent attention's rotary dimensions.
            "attention.value_length": whole("linear_head_dim"),
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
            "expert_weights_norm": flag("norm_topk_prob", "moe_renormalize"),
            "swiglu_clamp_exp": limits("expert_swiglu_limit_list"),
            "swiglu_clamp_shexp": limits("share_expert_swiglu_limit_list"),
        },
    ),
    "cohere2_moe": GgufHead(
        arch="cohere2moe",
        pre_tokenizer="cohere2moe",
        names=NAMES,
        fields={
            **FIELDS,
            "vocab_size": whole("vocab_size"),
            "logit_scale": real("logit_scale"),
            "feed_forward_length": either(whole("prefix_dense_intermediate_size"), whole("intermediate_size")),
            # Like the converter, list the trunk's layers only: a head module attends to all keys.
            "attention.sliding_window_pattern": of_kind(_SLIDING),
            "rope.dimension_count": whole("head_dim"),
            "rope.scaling.type": always("none"),
            "leading_dense_block_count": lambda config: [*config["mlp_layer_types"], "sparse"].index("sparse"),
            "expert_feed_forward_length": whole("intermediate_size"),
            "expert_shared_count": _if_shared(whole("num_shared_experts")),
            "expert_shared_feed_forward_length": _if_shared(product("intermediate_size", "num_shared_experts")),
            "expert_weights_norm": flag("norm_topk_prob"),
        },
    ),
    "deepseek_v4": GgufHead(
        arch="deepseek4",
        pre_tokenizer="joyai-llm",
        names={
            **NAMES,
            **BEFORE_FFN,
            **weights(
                {
                    "layer.self_attn.q_a_norm": "attn_q_a_norm",
                    "layer.self_attn.kv_norm": "attn_kv_a_norm",
                    "layer.self_attn.kv_proj": "attn_kv",
                    "layer.self_attn.o_a_proj": "attn_output_a",
                    "layer.self_attn.o_b_proj": "attn_output_b",
                }
            ),
            **{f"layer.{part}_hc.{one}": f"hc_{part}_{one}.weight" for part in ("attn", "ffn") for one in _MIXING},
        },
        outside={f"mixer.hc_{one}": f"output_hc_{one}.weight" for one in _MIXING},
        joined={"nextn.eh_proj.weight": Join(1, ("token_proj.weight", "hidden_proj.weight"))},
        fields={
            **FIELDS,
            "embedding_length_out": product("hidden_size", "hc_mult"),
            "attention.output_group_count": whole("o_groups"),
            "attention.output_lora_rank": whole("o_lora_rank"),
            "attention.compress_ratios": _ratios,
            "attention.compress_rope_freq_base": real("compress_rope_theta"),
            **_STRETCHED,
            "rope.freq_base": real("rope_theta"),
            "rope.dimension_count": whole("qk_rope_head_dim"),
            "expert_weights_norm": flag("norm_topk_prob"),
            "swiglu_clamp_exp": _bounds,
            "swiglu_clamp_shexp": _bounds,
            "hyper_connection.count": whole("hc_mult"),
            "hyper_connection.sinkhorn_iterations": whole("hc_sinkhorn_iters"),
            "hyper_connection.epsilon": real("hc_eps"),
            # The first layers route by token id.
            "hash_layer_count": lambda config: config["mlp_layer_types"].count("hash_moe"),
        },
    ),
}
"""Text-config model type to its record."""


def gguf_head_for(checkpoint: Checkpoint) -> GgufHead:
    """Return the record of a checkpoint's model type; raise an UnsupportedModelError if it has none."""
    model_type = str(checkpoint.text_config.get("model_type"))
    if model_type not in GGUF_HEADS:
        family = checkpoint.family
        raise UnsupportedModelError(
            f"{checkpoint.path}: llama.cpp does not draft with a head of {family.title}: "
            f"{family.serving['llama.cpp'].text}; expected one of "
            f"{', '.join(GGUF_HEADS)}. Export without --gguf, for another engine."
        )
    return GGUF_HEADS[model_type]
