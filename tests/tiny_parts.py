"""Sizes that the tiny configs share."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 67
SLIDING_WINDOW = 8

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
# Three Gated DeltaNet layers with grouped heads, then full attention.
GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
# One dense layer, then mixtures of four experts.
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
# Every name of these sizes in configs of mixtures; a config class has some of them.
MIXTURE: dict[str, Any] = {**QWEN_EXPERTS, **EXPERTS, "num_local_experts": 4}
LATENT: dict[str, Any] = {
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
    "num_key_value_heads": 2,
}
# Fewer keys than tokens in the tests' texts. With fewer heads many scores would be 0, and ties are broken arbitrarily.
INDEXER: dict[str, Any] = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}
