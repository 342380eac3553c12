"""Tiny configs of the trunks that the tests build: a few thousand parameters each, with every kind of layer.

A family without an entry gets tiny sizes for the fields that its config class has. It needs an entry only if these
do not show all of its kinds of layers, or leave something large.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from mtp_train.families import Family, family_named

VOCAB_SIZE = 67
SLIDING_WINDOW = 8

# Sizes that the configs share.

_SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"eos_token_id": None, "bos_token_id": None, "pad_token_id": None},
}
# Every name of the sizes of a mixture's four experts; a config class has some of them.
_QWEN_EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
}
_MIXTURE: dict[str, Any] = {**_QWEN_EXPERTS, **_EXPERTS, "num_local_experts": 4}
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_LATENT: dict[str, Any] = {
    **{"head_dim": 8, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 14},
}
# Fewer keys than tokens in the tests' texts. With fewer heads many scores would be 0, and ties are broken arbitrarily.
_INDEXER: dict[str, Any] = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}
_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 24, "intermediate_size": 16, "num_heads": 1}

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_HALF: dict[str, Any] = {**_ROPE, "partial_rotary_factor": 0.5}
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LINEAR = "linear_attention"
_YARN: dict[str, Any] = {**_ROPE, "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_TWO_ROPES: dict[str, Any] = {_SLIDING: _ROPE, _FULL: {"rope_type": "default", "rope_theta": 1e6}}
# Three Gated DeltaNet layers with grouped heads, then full attention.
_GATED_DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 8, "rope_parameters": _HALF},
}


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_next": _GATED_DELTA,
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1, "rope_parameters": _ROPE},
    "deepseek_v32": {**_LATENT, **_INDEXER, "rope_parameters": _ROPE},
    # A sliding window with experts by token, then groups of 2 keys of which 3 are chosen, groups of 4, groups of 2.
    "deepseek_v4": {
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 8},
        "layer_types": [
            *(_SLIDING, "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention")
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        **{"index_topk": 3, "index_head_dim": 16, "index_n_heads": 16, "partial_rotary_factor": 0.5, "hc_mult": 2},
    },
    "glm4_moe_lite": {**_LATENT, "rope_parameters": _ROPE},
    "glm_moe_dsa": {**_LATENT, **_INDEXER, "rope_parameters": _ROPE},
    # Full attention, then sliding windows with sinks, keys wider than values.
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "v_head_dim": 10,
        "layer_types": [_FULL, _SLIDING, _SLIDING],
        "rope_parameters": {_FULL: _HALF, _SLIDING: _HALF},
    },
    "hy_v3": {"rope_parameters": _ROPE},
    "hy_v4": {**_LATENT, **_INDEXER, "hc_mult": 2, "rope_parameters": _ROPE},
    "hy_v4_vl": {
        "text_config": {
            **_SIZES,
            **_EXPERTS,
            **_LATENT,
            **_INDEXER,
            **{"hc_mult": 2, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
        },
        "vision_config": {
            **{"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
            **{"out_hidden_size": 32, "max_image_size": 64},
        },
    },
    # Kimi Delta Attention twice, then latent attention.
    "bailing_hybrid": {
        **_without(_LATENT, "q_lora_rank"),
        **{"num_experts_per_tok": 2, "n_group": 2, "first_k_dense_replace": 1, "layer_group_size": 3},
        "rope_parameters": _ROPE,
    },
    "exaone_moe": {"layer_types": [_SLIDING, _SLIDING, _FULL], "rope_parameters": _ROPE},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "rope_parameters": _ROPE},
    # Mamba-2, attention, a mixture, Mamba-2, an MLP.
    "nemotron_h": {
        "layers_block_type": [_LINEAR, _FULL, "moe", _LINEAR, "mlp"],
        **{"num_hidden_layers": 5, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8},
        **{"n_groups": 2, "chunk_size": 4, "moe_shared_expert_intermediate_size": 16},
        # transformers limits time steps in prefill only: states would differ from a plain forward's.
        "time_step_min": 1e-12,
    },
    "longcat_flash": {
        **_LATENT,
        **{"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
        **{"moe_topk": 2, "zero_expert_num": 2, "rope_parameters": _ROPE},
    },
    # Full attention, then a sliding window; heads in number by the kind of layer.
    "step3p7": {
        "text_config": {
            **_SIZES,
            **{"pad_token_id": 0, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"share_expert_dim": 16, "sliding_window": SLIDING_WINDOW, "num_sliding_attention_heads": 4},
            "layer_types": [_FULL, _SLIDING, _SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "mtp_layer_types": [_SLIDING] * 3,
            "mtp_mlp_layer_types": ["dense"] * 3,
            "num_nextn_predict_layers": 3,
            "rope_theta": 1e4,
        },
        "vision_config": {"width": 16, "layers": 1, "heads": 1, "image_size": 28, "patch_size": 14},
    },
    # Relative distances and convolutions: a sliding window, all keys (the scores scaled from position 6), a window. The
    # head has modules of both kinds.
    "inkling": {
        "model_type": "inkling_mm_model",
        "text_config": {
            **_SIZES,
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
            **{"sliding_window_size": SLIDING_WINDOW, "d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 6},
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            **{"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            "logits_mup_width_multiplier": 2.0,
        },
        "mtp_config": {"num_nextn_predict_layers": 3, "chain_hidden_post_norm": False, "local_layer_ids": [0, 2]},
    },
    # Sliding windows, then full attention without positions; a layer's norms stand behind its parts.
    "exaone4_5": {
        "text_config": {
            **_SIZES,
            **{"model_type": "exaone4", "sliding_window": SLIDING_WINDOW, "num_nextn_predict_layers": 1},
            "layer_types": [_SLIDING, _SLIDING, _FULL],
            "rope_parameters": _ROPE,
        },
        "vision_config": {**_VISION, "num_key_value_heads": 1, "out_hidden_size": 32},
    },
    # Half of a head's width rotates, by time, height and width.
    "glm_ocr": {
        "text_config": {
            **_SIZES,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {**_HALF, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_VISION, "out_hidden_size": 32},
    },
    # Two sliding windows, then full attention, each with rotary frequencies of its own.
    "mellum": {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": _TWO_ROPES,
    },
    # Gated DeltaNet, the second with embedded n-grams of 2 and 3 tokens, then attention to the best 2 pools of 2 keys.
    "qwen4_exp": {
        "model_type": "qwen4_exp_text",
        **_GATED_DELTA,
        **_QWEN_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": [_LINEAR, _LINEAR, "indexed_attention"],
        **{"hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [2], "ple_embed_dim": 16, "heads_per_ngram": 2},
        **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2},
        **{"eos_token_id": 66, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2, "mtp_num_hidden_layers": 1},
    },
    # Kimi Delta Attention, then latent attention to the best 2 pools of 2 keys, chosen for two layers at once.
    "glm5_next": {
        "text_config": {
            **_SIZES,
            **_EXPERTS,
            **_LATENT,
            **{"head_dim": 0, "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 2, "hc_mult": 2},
            **{"index_topk": 4, "index_kpool": 2, "index_head_dim": 16, "index_n_heads": 16},
            "layer_types": [_LINEAR, "indexed_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared"],
        },
        "vision_config": {
            **_VISION,
            **{"hidden_size": 16, "out_hidden_size": 32, "projection_intermediate_size": 16, "image_size": 28},
        },
    },
    # A window, then the keys that an indexer chooses, then a window again, of more heads than the layer between.
    "dots3_note": {
        "model_type": "dots3_note_text",
        **_EXPERTS,
        **_LATENT,
        **_INDEXER,
        **{"head_dim": 20, "shared_experts_intermediate_size": 16, "first_k_dense_replace": 1},
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 20, "swa_kv_lora_rank": 18},
        **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 10},
    },
    # Full attention, then twice the best 2 blocks of 2 keys, chosen for each of two groups of heads.
    "minimax_m3": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            **_SIZES,
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"intermediate_size": 16, "dense_intermediate_size": 48, "shared_intermediate_size": 16},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 2, "index_topk_blocks": 2},
            "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": _HALF,
            "num_mtp_modules": 1,
        },
        "vision_config": {
            **{"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
            **{"image_size": 28, "patch_size": 14},
        },
    },
}

_ATTACHED: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": SLIDING_WINDOW},
    "qwen3_moe": {"mlp_only_layers": [1], "rope_parameters": _ROPE},
    # Two sliding windows, then full attention, each with rotary frequencies of its own.
    "gemma3_text": {
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 5.0,
        "rope_parameters": _TWO_ROPES,
    },
    "gemma2": {
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "query_pre_attn_scalar": 16,
        # Low enough to bound the scores and logits of tiny models.
        **{"attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0},
        "rope_parameters": _ROPE,
    },
    # Half of a head's width rotates, by frequencies of which there are two sets.
    "phi3": {
        "rope_parameters": {
            **_HALF,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [4.0, 5.0, 6.0, 7.0],
            "original_max_position_embeddings": 1024,
        },
        "original_max_position_embeddings": 1024,
        "max_position_embeddings": 8192,
    },
    "gpt_oss": {"intermediate_size": 16, "layer_types": [_SLIDING, _FULL, _SLIDING], "rope_parameters": _ROPE},
    "olmo3": {
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "rope_parameters": {
            _SLIDING: _ROPE,
            _FULL: {**_YARN, "factor": 8.0, "attention_factor": 1.2, "original_max_position_embeddings": 256},
        },
    },
    "granite": {
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625},
        "logits_scaling": 3.0,
        "rope_parameters": _ROPE,
    },
    # The last layer has no rotary embedding.
    "smollm3": {"no_rope_layers": [1, 1, 0], "rope_parameters": _ROPE},
    "mixtral": {"intermediate_size": 16, "rope_parameters": _ROPE},
    "minimax_m2": {"intermediate_size": 16, "rotary_dim": 8, "rope_parameters": _ROPE},
    "qwen2_moe": {
        **{
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "max_window_layers": 1,
        },
        "rope_parameters": _ROPE,
    },
    "ministral3": {
        "rope_parameters": {
            **_YARN,
            **{"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 14, "llama_4_scaling_beta": 0.1},
        },
    },
    "glm4": {"rope_parameters": _HALF},
    # Full attention without positions, sliding windows with them.
    "exaone4": {"layer_types": [_SLIDING, _SLIDING, _FULL], "rope_parameters": _ROPE},
    "hunyuan_v1_dense": {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3, "rope_parameters": _ROPE},
    "cohere2": {"layer_types": [_SLIDING, _SLIDING, _FULL], "logit_scale": 0.3, "rope_parameters": _ROPE},
    # A dense layer, a sliding window with a mixture, full attention with one and without positions.
    "cohere2_moe": {
        **{"intermediate_size": 16, "prefix_dense_intermediate_size": 48, "num_shared_experts": 1},
        "expert_selection_fn": "sigmoid",
        "layer_types": [_FULL, _SLIDING, _FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "logit_scale": 0.3,
        "rope_theta": 1e4,
    },
}
"""Trunks whose releases carry no head."""


def _derived(family: Family, model_type: str) -> dict[str, Any]:
    """Return tiny sizes for the fields that transformers' config class of the family's trunk has."""
    known = CONFIG_MAPPING[model_type]().to_dict()
    sizes = {name: size for name, size in {**_MIXTURE, "sliding_window": SLIDING_WINDOW}.items() if known.get(name)}
    return {**_SIZES, **sizes, **({} if family.attached or family.declaration.section else family.declaring(1, {}))}


def tiny_config(
    name: str,
    tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int | None = None,
    width: int | None = None,
    num_experts: int | None = None,
) -> PretrainedConfig:
    """Return the config of a tiny trunk, of as few layers as show all of its kinds or of another number.

    ``width``: of its hidden states and its dense MLPs. ``num_experts``: of a mixture, in place of four. With more than
    ten, the order of the experts' numbers is not the order of their names.
    """
    family = family_named(name)
    fields = copy.deepcopy({**_FIELDS, **_ATTACHED}.get(name, {}))
    common: dict[str, Any] = {"tie_word_embeddings": tied, "vocab_size": vocab_size}
    if num_layers is not None:
        common["num_hidden_layers"] = num_layers
    if width is not None:
        common |= {"hidden_size": width, "intermediate_size": width}
        if name == "phi3":
            # Its heads are as wide as the hidden states over their number, and its rotary factors are of that width.
            common["num_attention_heads"] = width // _SIZES["head_dim"]
    if "text_config" in fields:
        model_type = fields.pop("model_type", name)
        fields["text_config"].update(common)
    else:
        stand_in = family.trunk.stand_in
        released = family.model_types[0] if stand_in is None else stand_in.model_type
        model_type = fields.pop("model_type", released)
        fields = {**_derived(family, model_type), **fields, **common}
    config = AutoConfig.for_model(model_type, **fields)
    text_config = config.get_text_config()
    for field in _NUM_EXPERTS if num_experts is not None else ():
        if getattr(text_config, field, None) is not None:
            setattr(text_config, field, num_experts)
    return config
