"""The families mtp-train knows, one record each, and how a checkpoint's config picks one."""

from __future__ import annotations

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.glm4_moe import GLM4_MOE
from mtp_train.families.qwen3_5 import QWEN3_5
from mtp_train.families.spec import Convention as Convention
from mtp_train.families.spec import Family as Family
from mtp_train.families.spec import KeyRule as KeyRule
from mtp_train.families.spec import RawConfig as RawConfig
from mtp_train.families.spec import RecurrentKernels as RecurrentKernels
from mtp_train.families.spec import SharedKey as SharedKey

FAMILIES: tuple[Family, ...] = (QWEN3_5, GLM4_MOE)


def raw_text_config(config: RawConfig) -> RawConfig:
    """Return the language model's part of a raw ``config.json``: ``text_config`` where there is one."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def family_for(config: RawConfig, *, where: str) -> Family:
    """Return the family of a raw ``config.json``.

    Args:
        config: The parsed file, vision-language wrapper or text-only.
        where: The checkpoint's path, for the message.

    Raises:
        UnsupportedModelError: No family claims the model type.
    """
    model_type = raw_text_config(config).get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(f"{family.title} ({', '.join(family.model_types)})" for family in FAMILIES)
    raise UnsupportedModelError(
        f"{where}: config.json has model_type '{model_type}', an architecture without a known head layout; expected "
        f"one of {known}. Add a family record (CONTRIBUTING.md says how) or use a supported model."
    )
