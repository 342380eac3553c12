"""GGUF record of DeepSeek V4, whose trunk and head keep several residual streams.

The head has a mixer of these streams of its own, under the trunk's name for its one.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtp_train.families.gguf_fields import (
    DECODER,
    EXPERTS,
    NUM_MODULES,
    Value,
    flag,
    product,
    real,
    rope_scaling,
    whole,
)
from mtp_train.families.gguf_head import GgufHead, Join, weights
from mtp_train.families.spec import RawConfig

_EXPERTS_OF = {"gate": "w1", "down": "w2", "up": "w3"}
_MIXING = ("fn", "base", "scale")


# In layers that compress alone; attention is multiplied by nothing there, which transformers puts into the config.
_STRETCHED = {
    name: field for name, field in rope_scaling("compress").items() if name != "rope.scaling.yarn_attn_factor"
}


def _ratios(config: RawConfig) -> Value:
    """Say of each block how many rows its attention compresses to one, 0 for none, as in every module."""
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    return [*(rates[kind] for kind in config["layer_types"]), *[0] * config[NUM_MODULES]]


def _bounds(config: RawConfig) -> Value:
    return [float(config["swiglu_limit"])] * (config["num_hidden_layers"] + config[NUM_MODULES])


def _by_token(config: RawConfig) -> Value:
    """Count the first layers, which send every token to experts of its own."""
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
                # Releases leave these two to the trunk's, and the converter knows no name for them; the loader does.
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
