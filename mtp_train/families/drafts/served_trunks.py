"""Which trunks engines can pass to EAGLE, EAGLE-3 and Medusa heads, and the commands that do.

Sources: vLLM 0.32 and 0.33, SGLang 0.5.23 and llama.cpp 0c1e570.
"""

from __future__ import annotations

from mtp_train.families.engines import EngineSupport, no

_EVERYWHERE = {"llama", "mistral", "qwen3", "qwen3_moe", "gpt_oss"}
_HYBRID = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}
# Families that vLLM serves through transformers' own classes.
_BACKEND = {"olmo2", "olmo3", "smollm3", "seed_oss", "hunyuan_v1_dense"}
# Families and vision-language wrappers for which an engine passes the states between the trunk's layers to a head.
STATES_IN_VLLM = frozenset({*_EVERYWHERE, *_HYBRID, *_BACKEND, "ministral3", "mistral3", "qwen2", "phi3", "granite"})
STATES_IN_SGLANG = frozenset({*_EVERYWHERE, *_HYBRID, "ministral3", "qwen2", "phi3", "gemma3_text", "gemma3"})
STATES_IN_LLAMA_CPP = frozenset({*_EVERYWHERE, *_HYBRID, "mixtral"})
# Families for which an engine passes the last hidden state to a head. Trunks that scale their embeddings (Gemma,
# Granite) are left out: an EAGLE head would get them unscaled. EAGLE-3 norms the embeddings first.
LAST_STATES_IN_SGLANG = frozenset({*_EVERYWHERE, "ministral3", "qwen2", "phi3"})
LAST_STATES_IN_VLLM = LAST_STATES_IN_SGLANG | _BACKEND

UNVERIFIED = EngineSupport(None, "not verified for this model")
NO_EAGLE = no("has no EAGLE")
_VLLM = "vllm serve TRUNK"
_SGLANG = "python -m sglang.launch_server --model-path TRUNK"


def in_vllm(method: str, remark: str = "") -> EngineSupport:
    """Return the entry of vLLM for a draft model of one of its methods."""
    return EngineSupport(True, f"{_VLLM} --speculative-config {{vllm_{method}}}{remark}")


def in_sglang(algorithm: str) -> EngineSupport:
    """Return the entry of SGLang for a draft model of one of its algorithms."""
    drafts = (
        "--speculative-draft-model-path {path} --speculative-num-steps {depth} --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens {depth_plus_1}"
    )
    return EngineSupport(True, f"{_SGLANG} --speculative-algorithm {algorithm} {drafts}")
