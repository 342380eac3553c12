"""Entries of ``tiny_configs.py`` for trunks whose releases carry no head."""

from __future__ import annotations

from typing import Any

from tiny_parts import ROPE, SLIDING_WINDOW

ATTACHED_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": SLIDING_WINDOW},
    "qwen3_moe": {
        "mlp_only_layers": [1],
        "rope_parameters": ROPE,
    },
    # Two sliding windows, then full attention, each with rotary frequencies of its own.
    "gemma3_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        # Low enough to bound the scores and logits of tiny models.
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 5.0,
        "rope_parameters": ROPE,
    },
    # Half of a head's width rotates, by frequencies of which there are two sets.
    "phi3": {
        "rope_parameters": {
            **ROPE,
            "rope_type": "longrope",
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [4.0, 5.0, 6.0, 7.0],
            "original_max_position_embeddings": 1024,
        },
        "original_max_position_embeddings": 1024,
        "max_position_embeddings": 8192,
    },
    "gpt_oss": {
        "intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": ROPE,
    },
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 8.0,
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 256,
            },
        },
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 3.0,
        "rope_parameters": ROPE,
    },
    # The last layer has no rotary embedding.
    "smollm3": {"no_rope_layers": [1, 1, 0], "rope_parameters": ROPE},
    "mixtral": {"intermediate_size": 16, "rope_parameters": ROPE},
    "qwen2_moe": {
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": SLIDING_WINDOW,
        "max_window_layers": 1,
        "rope_parameters": ROPE,
    },
    "ministral3": {
        "rope_parameters": {
            **ROPE,
            "rope_type": "yarn",
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 14,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "glm4": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    # Full attention without positions, sliding windows with them.
    "exaone4": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": ROPE,
    },
    "hunyuan_v1_dense": {"rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3, "rope_parameters": ROPE},
    "cohere2": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "logit_scale": 0.3,
        "rope_parameters": ROPE,
    },
    # A dense layer, a sliding window with a mixture, full attention with one and without positions.
    "cohere2_moe": {
        "intermediate_size": 16,
        "prefix_dense_intermediate_size": 48,
        "num_shared_experts": 1,
        "expert_selection_fn": "sigmoid",
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "logit_scale": 0.3,
        "rope_theta": 1e4,
    },
}
