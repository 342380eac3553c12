"""Tiny configs of trunks whose indexers choose pools or blocks of keys, and of one whose head embeds by itself."""

from __future__ import annotations

from typing import Any

from tiny_parts import EXPERTS, GATED_DELTA, INDEXER, LATENT, QWEN_EXPERTS, ROPE, SIZES, SLIDING_WINDOW

INDEXED: dict[str, dict[str, Any]] = {
    # Gated DeltaNet, the second with embedded n-grams of 2 and 3 tokens, then attention to the best 2 pools of 2 keys.
    "qwen4_exp": {
        "model_type": "qwen4_exp_text",
        **GATED_DELTA,
        **QWEN_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [2],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "eos_token_id": 66,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "mtp_num_hidden_layers": 1,
    },
    # Kimi Delta Attention, then latent attention to the best 2 pools of 2 keys, chosen for two layers at once.
    "glm5_next": {
        "text_config": {
            **SIZES,
            **EXPERTS,
            **LATENT,
            "head_dim": 0,
            "qk_rope_head_dim": 0,
            "index_topk": 4,
            "index_kpool": 2,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "hc_mult": 2,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared"],
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 1,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "projection_intermediate_size": 16,
            "image_size": 28,
        },
    },
    # A window, then the keys that an indexer chooses, then a window again, of more heads than the layer between.
    "dots3_note": {
        "model_type": "dots3_note_text",
        **{name: value for name, value in EXPERTS.items() if name != "n_shared_experts"},
        **{name: value for name, value in LATENT.items() if name != "head_dim"},
        **INDEXER,
        "head_dim": 20,
        "n_shared_experts": 1,
        "shared_experts_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 20,
        "swa_kv_lora_rank": 18,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 10,
    },
    # Full attention, then twice the best 2 blocks of 2 keys, chosen for each of two groups of heads.
    "minimax_m3": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            **SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 2,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            "num_mtp_modules": 1,
        },
        "vision_config": {
            "hidden_size": 24,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
    },
}
