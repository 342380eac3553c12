"""What EAGLE, EAGLE-3 and Medusa heads share: the only layer that engines implement, Llama's, and these engines.

Sources of the engines' tables: vLLM 0.32 and 0.33, SGLang 0.5.23 and llama.cpp 0c1e570.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from mtp_train.families.engines import SGLANG_DRAFTS, EngineSupport, no
from mtp_train.families.spec import HeadLayer, RawConfig

# Settings that change the forward, and the values with which it equals the forward of the paper.
PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "num_hidden_layers": (1,),
}
_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def llama_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    """Return the config of Llama layers with the trunk's sizes and rotary base, and full attention."""
    fields = text_config.to_dict()
    heads = text_config.num_attention_heads
    rope = fields.get("rope_parameters") or {}
    # Layer types may have different rotary bases.
    rope = rope.get("full_attention", rope)
    width = fields.get("intermediate_size")
    return LlamaConfig(
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        # For a mixture of experts, the total width of the experts that one token uses.
        intermediate_size=width or fields["moe_intermediate_size"] * (fields["num_experts_per_tok"] + 1),
        num_hidden_layers=num_modules,
        num_attention_heads=heads,
        num_key_value_heads=text_config.num_key_value_heads,
        head_dim=fields.get("head_dim") or text_config.hidden_size // heads,
        max_position_embeddings=text_config.max_position_embeddings,
        rms_norm_eps=fields.get("rms_norm_eps") or 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
    )


draft_layer = partial(HeadLayer, "llama", "Llama", config=llama_config)
"""The layer of a head with the sizes and the rotary base of its trunk; takes further fields of ``HeadLayer``."""


def draft_config(layer_config: PretrainedConfig, trunk: RawConfig) -> dict[str, Any]:
    """Return the fields of a draft model's ``config.json`` that describe one Llama layer and the trunk's tokens."""
    layer = layer_config.to_dict()
    return {
        "model_type": "llama",
        **{name: layer[name] for name in _LAYER_FIELDS},
        **{name: trunk.get(name) for name in _TOKEN_FIELDS},
        **_older_rope(layer["rope_parameters"]),
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _older_rope(rope_parameters: RawConfig) -> dict[str, Any]:
    """Return the rotary embedding's settings in the format of transformers 4, which some engines read."""
    scaled = rope_parameters.get("rope_type", "default") != "default"
    scaling = {name: value for name, value in rope_parameters.items() if name != "rope_theta"} if scaled else None
    return {"rope_theta": rope_parameters["rope_theta"], "rope_scaling": scaling}


_EVERYWHERE = {"llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss"}
_HYBRID = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
# Families that vLLM serves through transformers' own classes.
_BACKEND = {"olmo2", "olmo3", "smollm3", "seed_oss", "hunyuan_v1_dense"}
# Families and vision-language wrappers for which an engine passes the states between the trunk's layers to a head.
STATES_IN_VLLM = {*_EVERYWHERE, *_HYBRID, *_BACKEND, "ministral3", "mistral3", "qwen2", "phi3", "granite"}
STATES_IN_SGLANG = {*_EVERYWHERE, *_HYBRID, "ministral3", "qwen2", "phi3", "gemma3_text", "gemma3"}
STATES_IN_LLAMA_CPP = {*_EVERYWHERE, *_HYBRID, "mixtral"}
# Families for which an engine passes the last hidden state to a head. Trunks that scale their embeddings (Gemma,
# Granite) are left out: an EAGLE head would get them unscaled. EAGLE-3 norms the embeddings first.
LAST_STATES_IN_SGLANG = {*_EVERYWHERE, "ministral3", "qwen2", "phi3"}
LAST_STATES_IN_VLLM = LAST_STATES_IN_SGLANG | _BACKEND

UNVERIFIED = EngineSupport(None, "not verified for this model")
NO_EAGLE = no("has no EAGLE")


def in_vllm(method: str) -> EngineSupport:
    return EngineSupport(True, f"vllm serve TRUNK --speculative-config {{vllm_{method}}}")


def in_llama_cpp(kind: str) -> EngineSupport:
    return EngineSupport(
        True,
        "python convert_hf_to_gguf.py {path} --target-model-dir TRUNK --outfile draft.gguf && "
        f"llama-server -m TRUNK.gguf -md draft.gguf --spec-type draft-{kind} --spec-draft-n-max {{depth}}",
    )


def in_sglang(algorithm: str) -> EngineSupport:
    return EngineSupport(
        True,
        f"python -m sglang.launch_server --model-path TRUNK --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {{path}} {SGLANG_DRAFTS}",
    )
