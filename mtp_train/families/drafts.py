"""EAGLE, EAGLE-3 and Medusa heads for trunks whose releases carry no head, as records derived from the trunk's family.

They share the trunk's embedding and lm_head, which stay frozen. EAGLE and EAGLE-3 heads are one Llama decoder layer for
every trunk, because engines implement that layer only. A Medusa head is one residual block per depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.blocks import Eagle3Layer, ResidualBlock
from mtp_train.families.convention import Convention
from mtp_train.families.draft_engines import draft_engines
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadKind,
    HeadLayer,
    KeyRule,
    RawConfig,
    Wiring,
)

_BEYOND_ATTACHED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose releases have an MTP head, and whose trunks may get a head of another kind too."""
NUM_EAGLE3_LAYERS = 3
WRITTEN_ARCHITECTURES: Mapping[HeadKind, tuple[str, ...]] = {
    # An engine uses the first name that it supports; SGLang has its own name for EAGLE heads.
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("LlamaForCausalLMEagle3",),
    "medusa": ("MedusaModel",),
}
"""Values of ``architectures`` in the draft models that are written for engines."""
SPECULATORS_ARCHITECTURE = "Eagle3DraftModel"
_ARCHITECTURES: Mapping[str, HeadKind] = {
    **{name: kind for kind, names in WRITTEN_ARCHITECTURES.items() for name in names},
    **dict.fromkeys(("Eagle3LlamaForCausalLM", "Eagle3Speculator", SPECULATORS_ARCHITECTURE), "eagle3"),
}


def draft_kind(config: RawConfig) -> HeadKind | None:
    """Return the kind of head of a draft model's raw ``config.json``, or None if it is not a draft model's."""
    found = (_ARCHITECTURES.get(name) for name in config.get("architectures") or [])
    return next((kind for kind in found if kind is not None), None)


def draft_title(kind: HeadKind) -> str:
    """Return the name of a kind other than ``mtp`` for tables and messages."""
    return _KINDS[kind].title


def eagle3_layers(text_config: PretrainedConfig) -> tuple[int, ...]:
    """Return the layers whose input EAGLE-3 reads: an early, the middle and a late layer, the same as in engines.

    The input of layer k is the state after k layers: transformers' ``hidden_states[k]``.
    """
    count = text_config.num_hidden_layers
    if count < NUM_EAGLE3_LAYERS:
        raise UnsupportedModelError(
            f"head.kind: eagle3 for a trunk of {count} layers; expected at least {NUM_EAGLE3_LAYERS}, because the head "
            "reads an early, a middle and a late layer. Write head.kind: mtp."
        )
    return (2, count // 2, count - 3)


def _llama_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    """Return the config of Llama layers with the trunk's sizes and rotary base, and full attention."""
    fields = text_config.to_dict()
    heads = text_config.num_attention_heads
    return LlamaConfig(
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        intermediate_size=_intermediate_size(fields),
        num_hidden_layers=num_modules,
        num_attention_heads=heads,
        num_key_value_heads=text_config.num_key_value_heads,
        head_dim=fields.get("head_dim") or text_config.hidden_size // heads,
        max_position_embeddings=text_config.max_position_embeddings,
        rms_norm_eps=fields.get("rms_norm_eps") or 1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(fields)},
        initializer_range=text_config.initializer_range,
    )


def _intermediate_size(fields: Mapping[str, Any]) -> int:
    """Return the MLP's width; for a mixture of experts, the total width of the experts that one token uses."""
    size = fields.get("intermediate_size")
    return int(size or fields["moe_intermediate_size"] * (fields["num_experts_per_tok"] + 1))


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """Return the rotary base of the trunk, or of its full attention if layer types have different ones."""
    rope = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or 10000.0)


def _without_input_norm(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: nn.Module = borrowed.cls(borrowed.layer)(config, layer_idx)
    layer.set_submodule("input_layernorm", nn.Identity())
    return layer


def _reading_two(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer = borrowed.cls(borrowed.layer)(config, layer_idx)
    # Only third-party EAGLE-3 checkpoints set it; ours omit it.
    adds_normed = bool(config.to_dict().get("norm_before_residual"))
    return Eagle3Layer(layer, borrowed.make_norm(config), adds_normed=adds_normed)


def _residual(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    return ResidualBlock(config.hidden_size)


@dataclass(frozen=True)
class _Kind:
    """The parts of a record that depend on the kind of head, and not on the trunk."""

    title: str
    prefixes: tuple[str, ...]
    rules: tuple[KeyRule, ...]
    build_layer: Callable[[Borrowed, PretrainedConfig, int], nn.Module]
    convention: Convention
    rotary: str | None = "LlamaRotaryEmbedding"
    final_norm: bool = False
    trunk_layers: Callable[[PretrainedConfig], tuple[int, ...]] = lambda text_config: ()


_KINDS: Mapping[HeadKind, _Kind] = {
    # EAGLE (arXiv:2401.15077): the trunk's lm_head reads the layer's output without a norm.
    "eagle": _Kind(
        title="EAGLE",
        prefixes=("fc.", "layers."),
        rules=(
            KeyRule(native="fc.weight", ours="proj.weight"),
            KeyRule(native="layers.{module}.{rest}", ours="layer.{rest}"),
        ),
        build_layer=_without_input_norm,
        convention=Convention(),
    ),
    # EAGLE-3 (arXiv:2503.01840).
    "eagle3": _Kind(
        title="EAGLE-3",
        prefixes=("fc.", "midlayer.", "norm."),
        rules=(
            KeyRule(native="fc.weight", ours="fc.weight"),
            KeyRule(native="norm.weight", ours="final_norm.weight"),
            KeyRule(native="midlayer.{rest}", ours="layer.{rest}"),
        ),
        build_layer=_reading_two,
        convention=Convention(hidden="of_layers", recycle="before_final_norm"),
        final_norm=True,
        trunk_layers=eagle3_layers,
    ),
    # Medusa (arXiv:2401.10774), except that every block is followed by the trunk's lm_head.
    "medusa": _Kind(
        title="Medusa",
        prefixes=("blocks.",),
        rules=(KeyRule(native="blocks.{module}.layers.0.{rest}", ours="layer.linear.{rest}"),),
        build_layer=_residual,
        convention=Convention(recycle="trunk"),
        rotary=None,
    ),
}


def of_kind(family: Family, kind: HeadKind) -> Family:
    """Return the record of ``family``'s trunk with a head of ``kind``; for ``mtp`` the family's own record.

    Raises:
        UnsupportedModelError: Heads of this kind are not supported for the family's trunks.
    """
    if kind == "mtp":
        return family
    if not (family.attached or family.name in _BEYOND_ATTACHED):
        raise UnsupportedModelError(
            f"head.kind: {kind} for a trunk of {family.title}; expected a family whose releases carry no head, or "
            "Qwen3.5 or Qwen3-Next. Write head.kind: mtp: this family's releases have an MTP head."
        )
    parts = _KINDS[kind]
    return replace(
        family,
        kind=kind,
        title=f"{parts.title} for {family.title}",
        declaration=Declaration(count=None),
        keys=replace(
            family.keys, head_prefixes=parts.prefixes, rules=parts.rules, shared=(), num_sublayers=lambda config: 1
        ),
        wiring=Wiring(
            final_norm=parts.final_norm,
            trunk_layers=parts.trunk_layers,
            default=parts.convention,
            conventions={"vllm": parts.convention, "sglang": parts.convention, "llama.cpp": parts.convention},
        ),
        layer=HeadLayer(
            config=_llama_config,
            borrowed=Borrowed(
                python_module="transformers.models.llama.modeling_llama",
                layer="LlamaDecoderLayer",
                norm="LlamaRMSNorm",
                rotary=parts.rotary,
                build_layer=parts.build_layer,
            ),
        ),
        engines=Engines(support=draft_engines(kind, family.wrapper or family.name)),
    )
