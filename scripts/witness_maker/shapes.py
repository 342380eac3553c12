"""Define the sizes of a small model of each family that the CPU kernels of engines can run.

These kernels need attention heads of 32 or more, linear-attention heads of 128, and a latent cache of 512 + 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from witness_maker.words import NUM_TOKENS, VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class WitnessShape:
    """Configuration of a model to make."""

    fields: Mapping[str, Any]
    """Fields of the text config."""
    config_type: str | None = None
    """Model type of the config in transformers; None for the family's own type."""
    wrapper: Mapping[str, Any] | None = None
    """Fields of the outer config, for a model that exists only as part of a vision-language model; else None."""
    num_modules: int = 1
    """Number of modules in the head."""
    released: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the text config in releases, where transformers writes others; None removes a field."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Python files of the checkpoint: name to text."""
    always_chosen: int = 0
    """Number of experts that the correction bias selects for every token; with 0 the scores select them."""


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GATED_DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}
# All experts are used: in engines with bf16 only, rounding would route tokens to other experts.
_ALL_OF_FOUR = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_EIGHT_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# One dense layer, then mixture layers of eight experts in two groups.
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "rope_parameters": _ROPE,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1}
# `index_topk` of the releases, which is more rows than these texts have.
_INDEXED = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 2048}
_VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
_WINDOWS_BETWEEN = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
# Fields of the releases for behaviour that transformers always has.
_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

SHAPES: Mapping[str, WitnessShape] = MappingProxyType(
    {
        "qwen3_5": WitnessShape(fields=_SIZES | _GATED_DELTA),
        "qwen3_5_moe": WitnessShape(fields=_SIZES | _GATED_DELTA | _ALL_OF_FOUR),
        "gemma4": WitnessShape(
            fields=_SIZES
            | {
                # llama.cpp's converter drops rows of tokens that the tokenizer lacks, and its loader then refuses them.
                "vocab_size": NUM_TOKENS,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 3,
                "hidden_size_per_layer_input": 32,
                "vocab_size_per_layer_input": NUM_TOKENS,
                "global_head_dim": 64,
                "sliding_window": 16,
                "final_logit_softcapping": 30.0,
            }
        ),
        "qwen3_next": WitnessShape(fields=_SIZES | _GATED_DELTA | _ALL_OF_FOUR),
        "glm4_moe": WitnessShape(fields=_SIZES | _ROUTED | {"first_k_dense_replace": 1}),
        "deepseek_v3": WitnessShape(
            fields=_SIZES | _ROUTED | _LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
            released=_ROUTER,
        ),
        "glm4_moe_lite": WitnessShape(
            fields=_SIZES | _ROUTED | _LATENT, released={**_ROUTER, "first_k_dense_replace": 1}
        ),
        "glm_moe_dsa": WitnessShape(
            fields=_SIZES | _ROUTED | _LATENT | _INDEXED | {"first_k_dense_replace": 1}, released=_ROUTER
        ),
        "deepseek_v32": WitnessShape(
            fields=_SIZES | _ROUTED | _LATENT | _INDEXED | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
            released=_ROUTER,
        ),
        "deepseek_v4": WitnessShape(
            fields={name: value for name, value in _SIZES.items() if name != "intermediate_size"}
            | {
                "num_key_value_heads": 1,
                "head_dim": 64,
                "q_lora_rank": 64,
                "o_groups": 2,
                "o_lora_rank": 64,
                "sliding_window": 16,
                "index_n_heads": 4,
                "index_head_dim": 128,
                "index_topk": 8,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "rope_parameters": {"rope_type": "yarn", **_YARN},
                "compress_ratios": [0, 4, 128, 4],
                "num_hash_layers": 1,
                "qk_rope_head_dim": 32,
            },
            # Names of the releases; transformers uses others. The ratios include the head's layer.
            released={
                "compress_ratios": [0, 4, 128, 4, 0],
                "num_hash_layers": 1,
                "qk_rope_head_dim": 32,
                "rope_scaling": {"type": "yarn", **_YARN},
                **dict.fromkeys(
                    ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
                ),
            },
        ),
        "mimo": WitnessShape(
            fields={name: value for name, value in _SIZES.items() if name != "head_dim"}
            | {"num_nextn_predict_layers": 1, "rope_parameters": _ROPE},
            released={
                "model_type": "mimo",
                "architectures": ["MiMoForCausalLM"],
                "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            },
            code={
                "configuration_mimo.py": (
                    "from transformers import Qwen2Config\n\n\n"
                    'class MiMoConfig(Qwen2Config):\n    model_type = "mimo"\n'
                )
            },
        ),
        # Trunks whose releases have no head: an attached one is made.
        "llama": WitnessShape(fields=_SIZES | {"rope_parameters": _ROPE}),
        "qwen2": WitnessShape(
            fields={name: value for name, value in _SIZES.items() if name != "head_dim"} | {"rope_parameters": _ROPE}
        ),
        "qwen3": WitnessShape(fields=_SIZES | {"rope_parameters": _ROPE}),
        "qwen3_moe": WitnessShape(
            fields=_SIZES
            | {name: value for name, value in _ALL_OF_FOUR.items() if name != "shared_expert_intermediate_size"}
            | {"rope_parameters": _ROPE}
        ),
        "cohere2_moe": WitnessShape(
            fields=_SIZES
            | {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "intermediate_size": 128,
                "num_shared_experts": 1,
                "prefix_dense_intermediate_size": 256,
                "expert_selection_fn": "sigmoid",
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "logit_scale": 0.25,
                "rope_theta": 10_000.0,
            }
        ),
        "mimo_v2_flash": WitnessShape(
            fields=_SIZES
            | _ROUTED
            | {
                "v_head_dim": 32,
                "sliding_window": 129,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "rope_parameters": {
                    kind: {**_ROPE, "partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")
                },
            },
            num_modules=3,
            # Names of the releases; transformers uses others. In transformers and SGLang the window is one wider
            # than the released number, in vLLM it is not. No text is that long here.
            released={
                "layernorm_epsilon": 1e-5,
                "rope_theta": 10_000.0,
                "swa_rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 4,
                "swa_head_dim": 32,
                "swa_v_head_dim": 32,
                "sliding_window_size": 128,
                "add_swa_attention_sink_bias": True,
                "hybrid_layer_pattern": [0, 1, 1, 0],
                "moe_layer_freq": [0, 1, 1, 1],
                **_ROUTER,
            },
        ),
        "hy_v3": WitnessShape(
            fields=_SIZES | _EIGHT_EXPERTS | {"num_nextn_predict_layers": 1, "rope_parameters": _ROPE},
            released={"first_k_dense_replace": 1, "expert_hidden_dim": 128, "route_norm": True, "qk_norm": True},
        ),
        "exaone_moe": WitnessShape(
            fields=_SIZES
            | _EIGHT_EXPERTS
            | {
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "num_nextn_predict_layers": 1,
                "rope_parameters": _ROPE,
            }
        ),
        "mellum": WitnessShape(
            fields=_SIZES
            | _EIGHT_EXPERTS
            | {
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "num_nextn_predict_layers": 1,
                "rope_parameters": {
                    "sliding_attention": _ROPE,
                    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                },
            }
        ),
        "exaone4_5": WitnessShape(
            fields=_SIZES
            | {
                "model_type": "exaone4",
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "num_nextn_predict_layers": 1,
                "rope_parameters": _ROPE,
            },
            # vLLM's head reads `vocab_size` from the outer config, which has it in releases too.
            wrapper={"vision_config": _VISION | {"num_key_value_heads": 1}, "vocab_size": VOCAB_SIZE},
        ),
        "glm_ocr": WitnessShape(
            fields=_SIZES
            | {
                "num_nextn_predict_layers": 1,
                "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
            },
            config_type="glm_ocr",
            wrapper={"vision_config": _VISION},
        ),
        "ernie4_5_moe": WitnessShape(
            fields=_SIZES
            | {
                "moe_num_experts": 8,
                "moe_k": 2,
                "moe_intermediate_size": 128,
                "moe_num_shared_experts": 1,
                "num_nextn_predict_layers": 1,
                "rope_parameters": _ROPE,
            }
        ),
        "nemotron_h": WitnessShape(
            # No dense MLP: llama.cpp's graph of this mixture has none.
            fields=_SIZES
            | {
                "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
                "num_hidden_layers": 5,
                "ssm_state_size": 64,
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "n_groups": 2,
                "chunk_size": 16,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 128,
                "moe_shared_expert_intermediate_size": 128,
                "num_nextn_predict_layers": 1,
            }
        ),
        "longcat_flash": WitnessShape(
            fields=_SIZES
            | _LATENT
            | {
                "num_layers": 2,
                "num_hidden_layers": 4,
                "ffn_hidden_size": 256,
                "moe_topk": 2,
                "n_routed_experts": 8,
                "zero_expert_num": 2,
                "expert_ffn_hidden_size": 128,
            },
            released={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
        ),
        "bailing_hybrid": WitnessShape(
            fields=_SIZES
            | {name: value for name, value in _ROUTED.items() if name != "n_routed_experts"}
            | {name: value for name, value in _LATENT.items() if name != "q_lora_rank"}
            | {
                "num_local_experts": 8,
                "first_k_dense_replace": 1,
                "layer_group_size": 2,
                "n_group": 2,
                "topk_group": 1,
            },
            released={
                "architectures": ["BailingMoeV3ForCausalLM"],
                "head_dim": 64,
                "max_position_embeddings": 2048,
                "rope_theta": 10_000.0,
                "no_kda_lora": True,
                "gated_attention_proj_granularity_type": "head_wise",
                "num_experts_per_tok": 2,
                "n_group": 2,
                "moe_shared_expert_intermediate_size": 128,
                "score_function": "sigmoid",
                "norm_topk_prob": True,
                **dict.fromkeys(
                    (
                        *("layer_types", "linear_head_dim", "model_max_length", "moe_renormalize"),
                        *("num_expert_group", "num_experts_per_token"),
                    )
                ),
            },
        ),
        "step3p7": WitnessShape(
            config_type="step3p7",
            wrapper={"vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}},
            fields=_SIZES
            | {
                "pad_token_id": 0,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "share_expert_dim": 128,
                "sliding_window": 16,
                "num_sliding_attention_heads": 8,
                "layer_types": _WINDOWS_BETWEEN,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "mtp_layer_types": ["sliding_attention"] * 3,
                "mtp_mlp_layer_types": ["dense"] * 3,
                "num_nextn_predict_layers": 3,
                "rope_theta": 10_000.0,
                "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            },
            num_modules=3,
            # Per-layer lists of releases include the head's modules.
            released={
                "num_attention_groups": 2,
                "attention_other_setting": {
                    "attention_type": "sliding_attention",
                    "num_attention_heads": 8,
                    "num_attention_groups": 2,
                    "head_dim": 32,
                },
                "layer_types": [*_WINDOWS_BETWEEN, *["sliding_attention"] * 3],
                "rope_theta": [10_000.0] * 7,
                "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0],
                "moe_layers_enum": "1,2,3",
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "moe_every_n_layer": 1,
                "moe_router_activation": "sigmoid",
                "use_moe_router_bias": True,
                "need_fp32_gate": True,
                "norm_expert_weight": True,
                "use_head_wise_attn_gate": True,
                **dict.fromkeys(
                    (
                        *("num_key_value_heads", "num_sliding_attention_heads", "per_layer_config", "rope_parameters"),
                        *("mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types"),
                        *("n_routed_experts", "num_experts_per_tok", "num_local_experts"),
                    )
                ),
            },
        ),
    }
)
