"""Tiny random models of every family, built in memory.

Weights are large enough that greedy decoding does not fall into a loop, and recurrent states forget slowly enough that
a wrong state shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
)

from mtp_train.families import FAMILIES, Family
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk

FAMILY_NAMES = tuple(family.name for family in FAMILIES)
VOCAB_SIZE = 67
WEIGHT_STD = 0.3
SLIDING_WINDOW = 8
_KINDS = {"full": "glm4_moe", "recurrent": "qwen3_5", "sliding": "mistral", "mixed": "qwen2"}
CACHE_KINDS = _KINDS | {name: name for name in FAMILY_NAMES if name not in _KINDS.values()}
"""What a trunk keeps, and the name of a tiny trunk that keeps it, any other families after them. ``sliding`` and
``mixed`` belong to no family and have no head."""


def tiny_trunk(name: str, seed: int = 0, tied: bool = False, vocab_size: int = VOCAB_SIZE) -> Trunk:
    """Return a trunk of a few thousand parameters, fp32 on CPU, frozen and in eval mode."""
    make_config = {
        "qwen3_5": _qwen3_5_config,
        "glm4_moe": _glm4_moe_config,
        "mistral": _mistral_config,
        "qwen2": _qwen2_config,
    }[name]
    model = AutoModelForCausalLM.from_config(make_config(tied, vocab_size))
    _randomize(model, seed)
    model.tie_weights()
    return Trunk(model.requires_grad_(False).eval(), _family(name))


def tiny_head(trunk: Trunk, seed: int = 0, num_modules: int = 1) -> MtpHead:
    """Return a random head for a tiny trunk, in eval mode."""
    head = MtpHead(trunk.family, trunk.config, num_modules=num_modules, convention=trunk.family.default)
    _randomize(head, seed + 1000)
    return head.eval()


def chained_head(trunk: Trunk, num_modules: int, seed: int = 0) -> MtpHead:
    """Return a random head with a module for each depth, in eval mode."""
    family = dataclasses.replace(trunk.family, unroll="chained")
    head = MtpHead(family, trunk.config, num_modules=num_modules, convention=family.default)
    _randomize(head, seed + 1000)
    return head.eval()


def _family(name: str) -> Family:
    families = {family.name: family for family in FAMILIES}
    if name in families:
        return families[name]
    # Borrowed for what it says of the trunk: no recurrent layers.
    return dataclasses.replace(families["glm4_moe"], name=name, masks_by_layer_type=name == "qwen2")


def _randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise - 3)
            elif parameter.ndim > 1:
                parameter.copy_(WEIGHT_STD * noise)
            else:
                parameter.add_(0.1 * noise)


def _sizes(tied: bool, vocab_size: int) -> dict[str, Any]:
    """Return what all tiny trunks have in common."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": tied,
    }


def _qwen3_5_config(tied: bool, vocab_size: int) -> PretrainedConfig:
    """Three Gated DeltaNet layers with grouped heads, then full attention."""
    return Qwen3_5TextConfig(
        **_sizes(tied, vocab_size),
        num_hidden_layers=4,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )


def _glm4_moe_config(tied: bool, vocab_size: int) -> PretrainedConfig:
    """One dense layer, then two mixtures of four experts."""
    return Glm4MoeConfig(
        **_sizes(tied, vocab_size),
        moe_intermediate_size=16,
        num_hidden_layers=3,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )


def _mistral_config(tied: bool, vocab_size: int) -> PretrainedConfig:
    """Three layers with a sliding window."""
    return MistralConfig(
        **_sizes(tied, vocab_size),
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
    )


def _qwen2_config(tied: bool, vocab_size: int) -> PretrainedConfig:
    """One layer of full attention, then two with a sliding window."""
    return Qwen2Config(
        **_sizes(tied, vocab_size),
        num_hidden_layers=3,
        use_sliding_window=True,
        max_window_layers=1,
        sliding_window=SLIDING_WINDOW,
    )
