"""Known models without an MTP head in their releases, or with one that no engine loads."""

from __future__ import annotations

from collections.abc import Mapping

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.models.attached import ATTACHED
from mtp_train.families.spec import RawConfig, raw_text_config

_NONE = "its releases carry no MTP head"
_UNSERVED = "no engine has an MTP head for it"
_ASSISTED = f"{_NONE}: its drafter is a separate checkpoint, the assistant; pass it to generate as --head"

HEADLESS: Mapping[str, str] = {
    **dict.fromkeys(("llama4", "llama4_text", "mistral3", "mistral4", "gemma", "gemma3", "starcoder2"), _NONE),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text", "minimax_m2", "granitemoehybrid"), _NONE),
    "kimi_k3": "vLLM alone has an MTP head for it, and transformers no class",
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear", "solar_open", "youtu", "axk1", "AXK1"), _UNSERVED),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _ASSISTED),
}
"""Value of ``model_type`` to the reason why no head is handled."""

NOT_ATTACHED = f"A head can be attached to {', '.join(family.title for family in ATTACHED)}."


def refuse_unserved_heads(config: RawConfig, *, where: str) -> None:
    """Refuse a model with heads of a kind that no engine loads.

    Args:
        config: Its ``config.json`` or Meta's ``params.json``.
        where: The path that messages name.

    Raises:
        UnsupportedModelError: The config describes such heads.
    """
    found = _unserved_heads(raw_text_config(config))
    if found is not None:
        raise UnsupportedModelError(
            f"{where}: has {found}, which vLLM, SGLang, llama.cpp and transformers do not load; expected a head that "
            f"one of them serves. {NOT_ATTACHED}"
        )


def _unserved_heads(config: RawConfig) -> str | None:
    # Gloeckle et al. 2024 (arXiv:2404.19737): the heads run in parallel to the last layer and read no drafted token.
    future = config.get("n_future_tokens")
    if isinstance(future, int) and future > 1:
        return f"{future - 1} extra heads of Meta's multi-token prediction (n_future_tokens {future})"
    # Medusa's own layout. The layout that vLLM reads is a separate draft model (drafts/medusa.py).
    if config.get("medusa_num_heads"):
        return "Medusa heads"
    if config.get("model_type") == "mlp_speculator":
        return "an MLP speculator"
    return None
