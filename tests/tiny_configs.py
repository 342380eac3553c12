"""Tiny configs of the trunks that the tests build: a few thousand parameters each, with every kind of layer.

A family without an entry gets tiny sizes for the fields that its config class has. It needs an entry only if these
do not show all of its kinds of layers, or leave something large.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from mtp_train.families import Family, family_named
from tiny_attached_configs import ATTACHED_FIELDS
from tiny_indexed import INDEXED
from tiny_parts import GATED_DELTA as _GATED_DELTA
from tiny_parts import INDEXER as _INDEXER
from tiny_parts import LATENT as _LATENT
from tiny_parts import MIXTURE, ROPE
from tiny_parts import SIZES as _SIZES
from tiny_parts import SLIDING_WINDOW as SLIDING_WINDOW
from tiny_parts import VOCAB_SIZE as VOCAB_SIZE

_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_next": _GATED_DELTA,
    **INDEXED,
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1, "rope_parameters": ROPE},
    "deepseek_v32": {**_LATENT, **_INDEXER, "rope_parameters": ROPE},
    # A sliding window with experts by token, then groups of 2 keys of which 3 are chosen, groups of 4, groups of 2.
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_topk": 3,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "partial_rotary_factor": 0.5,
        "hc_mult": 2,
    },
    "glm4_moe_lite": {**_LATENT, "rope_parameters": ROPE},
    "glm_moe_dsa": {**_LATENT, **_INDEXER, "rope_parameters": ROPE},
    # Full attention, then sliding windows with sinks, keys wider than values.
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "v_head_dim": 10,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {**ROPE, "partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")
        },
    },
    "hy_v3": {"rope_parameters": ROPE},
    "hy_v4": {**_LATENT, **_INDEXER, "hc_mult": 2, "rope_parameters": ROPE},
    # Kimi Delta Attention twice, then latent attention.
    "bailing_hybrid": {
        "num_experts_per_tok": 2,
        "n_group": 2,
        **{name: value for name, value in _LATENT.items() if name != "q_lora_rank"},
        "first_k_dense_replace": 1,
        "layer_group_size": 3,
        "rope_parameters": ROPE,
    },
    "exaone_moe": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": ROPE,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "rope_parameters": ROPE,
    },
    # Mamba-2, attention, a mixture, Mamba-2, an MLP.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
        "num_hidden_layers": 5,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
        # transformers limits time steps in prefill only: states would differ from a plain forward's.
        "time_step_min": 1e-12,
        "moe_shared_expert_intermediate_size": 16,
    },
    "longcat_flash": {
        **{name: value for name, value in _LATENT.items() if name != "head_dim"},
        "head_dim": 8,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 16,
        "rope_parameters": ROPE,
    },
    # Full attention, then a sliding window; heads in number by the kind of layer.
    "step3p7": {
        "text_config": {
            **_SIZES,
            "pad_token_id": 0,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "share_expert_dim": 16,
            "sliding_window": SLIDING_WINDOW,
            "num_sliding_attention_heads": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "mtp_layer_types": ["sliding_attention"] * 3,
            "mtp_mlp_layer_types": ["dense", "dense", "dense"],
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
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": SLIDING_WINDOW,
            "d_rel": 4,
            "rel_extent": 12,
            "log_scaling_n_floor": 6,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "logits_mup_width_multiplier": 2.0,
        },
        "mtp_config": {"num_nextn_predict_layers": 3, "chain_hidden_post_norm": False, "local_layer_ids": [0, 2]},
    },
    # Sliding windows, then full attention without positions; a layer's norms stand behind its parts.
    "exaone4_5": {
        "text_config": {
            **_SIZES,
            "model_type": "exaone4",
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_nextn_predict_layers": 1,
            "rope_parameters": ROPE,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 24,
            "intermediate_size": 16,
            "num_heads": 1,
            "num_key_value_heads": 1,
            "out_hidden_size": 32,
        },
    },
    # Half of a head's width rotates, by time, height and width.
    "glm_ocr": {
        "text_config": {
            **_SIZES,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 24,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": 32,
        },
    },
    # Two sliding windows, then full attention, each with rotary frequencies of its own.
    "mellum": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
}


def _derived(family: Family, model_type: str) -> dict[str, Any]:
    """Return tiny sizes for the fields that transformers' config class of the family's trunk has."""
    known = CONFIG_MAPPING[model_type]().to_dict()
    sizes = {name: size for name, size in {**MIXTURE, "sliding_window": SLIDING_WINDOW}.items() if known.get(name)}
    return {**_SIZES, **sizes, **({} if family.attached else family.count_as_field(1))}


def tiny_config(
    name: str,
    tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int | None = None,
    width: int | None = None,
) -> PretrainedConfig:
    """Return the config of a tiny trunk, of as few layers as show all of its kinds or of another number.

    ``width``: of its hidden states and its dense MLPs.
    """
    family = family_named(name)
    fields = copy.deepcopy({**_FIELDS, **ATTACHED_FIELDS}.get(name, {}))
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
    config: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    return config
