"""Models that people ask for and whose releases carry no MTP head, or none that any engine loads."""

from __future__ import annotations

from collections.abc import Mapping

_NONE = "its releases carry no MTP head"
_ASSISTED = f"{_NONE}: its drafter is a checkpoint of its own, the assistant"

HEADLESS: Mapping[str, str] = {
    **dict.fromkeys(("llama", "llama4", "llama4_text"), _NONE),
    **dict.fromkeys(("mistral", "mistral3", "ministral3", "mixtral"), _NONE),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _NONE),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _NONE),
    **dict.fromkeys(("olmo2", "olmo3", "phi3", "gpt_oss", "cohere2", "granite", "smollm3", "minimax_m2"), _NONE),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _ASSISTED),
}
"""Value of ``model_type`` to the reason."""
