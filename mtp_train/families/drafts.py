"""Heads of other kinds for trunks that have none: EAGLE, EAGLE-3 and Medusa, as records derived from the trunk's.

The trunk's embedding and output matrix are theirs too, frozen like the trunk. EAGLE and EAGLE-3 are one layer of
Llama's kind whatever the trunk's layers are, which is what engines have; Medusa is a residual block for each depth.
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
from mtp_train.families.spec import Borrowed, CountField, Family, HeadKind, KeyRule, RawConfig

_BEYOND_ATTACHED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families with a head of their own whose trunks may get one of another kind too."""
NUM_EAGLE3_LAYERS = 3
WRITTEN_ARCHITECTURES: Mapping[HeadKind, tuple[str, ...]] = {
    # An engine takes the first that it knows: SGLang has its own name for EAGLE's.
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
    "eagle3": ("LlamaForCausalLMEagle3",),
    "medusa": ("MedusaModel",),
}
"""What draft models for engines call themselves."""
SPECULATORS_ARCHITECTURE = "Eagle3DraftModel"
_ARCHITECTURES: Mapping[str, HeadKind] = {
    **{name: kind for kind, names in WRITTEN_ARCHITECTURES.items() for name in names},
    **dict.fromkeys(("Eagle3LlamaForCausalLM", "Eagle3Speculator", SPECULATORS_ARCHITECTURE), "eagle3"),
}


def draft_kind(config: RawConfig) -> HeadKind | None:
    """Return the kind of head that a raw ``config.json`` is of, where it is a draft model's, else None."""
    found = (_ARCHITECTURES.get(name) for name in config.get("architectures") or [])
    return next((kind for kind in found if kind is not None), None)


def draft_title(kind: HeadKind) -> str:
    """Return how people call heads of another kind than ``mtp``."""
    return _KINDS[kind].title


def eagle3_layers(text_config: PretrainedConfig) -> tuple[int, ...]:
    """Return the layers whose input EAGLE-3 reads: an early one, the middle and a late one, as engines take them.

    Layer k's input is the state after k layers: transformers' ``hidden_states[k]``.
    """
    count = text_config.num_hidden_layers
    if count < NUM_EAGLE3_LAYERS:
        raise UnsupportedModelError(
            f"head.kind: eagle3 for a trunk of {count} layers; expected at least {NUM_EAGLE3_LAYERS}, to read an "
            "early, a middle and a late one. Write head.kind: mtp."
        )
    return (2, count // 2, count - 3)


def _llama_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    """Return the config of layers of Llama's kind as wide as the trunk's, with full attention and its rotary base."""
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
    """Of a mixture, as wide as the experts that a token uses."""
    size = fields.get("intermediate_size")
    return int(size or fields["moe_intermediate_size"] * (fields["num_experts_per_tok"] + 1))


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """The base of full attention, where a trunk's kinds of layers have several."""
    rope = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or 10000.0)


def _without_input_norm(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: nn.Module = borrowed.cls(borrowed.layer)(config, layer_idx)
    layer.set_submodule("input_layernorm", nn.Identity())
    return layer


def _reading_two(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer = borrowed.cls(borrowed.layer)(config, layer_idx)
    # Of somebody's draft model; ours say nothing of it.
    adds_normed = bool(config.to_dict().get("norm_before_residual"))
    return Eagle3Layer(layer, borrowed.make_norm(config), adds_normed=adds_normed)


def _residual(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    return ResidualBlock(config.hidden_size)


@dataclass(frozen=True)
class _Kind:
    """What makes a head of one kind, whatever the trunk."""

    title: str
    prefixes: tuple[str, ...]
    rules: tuple[KeyRule, ...]
    build_layer: Callable[[Borrowed, PretrainedConfig, int], nn.Module]
    convention: Convention
    rotary: str | None = "LlamaRotaryEmbedding"
    final_norm: bool = False
    trunk_layers: Callable[[PretrainedConfig], tuple[int, ...]] = lambda text_config: ()


_KINDS: Mapping[HeadKind, _Kind] = {
    # EAGLE (arXiv:2401.15077): what follows the layer is the state that the trunk's lm_head reads.
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
    # Medusa (arXiv:2401.10774), with the trunk's lm_head at the end of every block.
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
    """Return the record of a trunk of ``family`` with a head of ``kind``; of ``mtp`` its own.

    Raises:
        UnsupportedModelError: Such a head is not made for the family's trunks here.
    """
    if kind == "mtp":
        return family
    if not (family.attached or family.name in _BEYOND_ATTACHED):
        raise UnsupportedModelError(
            f"head.kind: {kind} for a trunk of {family.title}; expected a family whose releases carry no head, or "
            "Qwen3.5 or Qwen3-Next. Write head.kind: mtp, which this family has a head of its own for."
        )
    parts = _KINDS[kind]
    return replace(
        family,
        kind=kind,
        title=f"{parts.title} for {family.title}",
        count=CountField(name=None),
        declared_beside={},
        head_config_fields=(),
        head_prefixes=parts.prefixes,
        key_rules=parts.rules,
        shared_keys=(),
        num_sublayers=lambda config: 1,
        concat="embed_first",
        final_norm=parts.final_norm,
        chain_norm=None,
        own_lm_head=False,
        own_embedding=False,
        default=parts.convention,
        conventions={"vllm": parts.convention, "sglang": parts.convention, "llama.cpp": parts.convention},
        head_layer_config=_llama_config,
        trunk_layers=parts.trunk_layers,
        borrowed=Borrowed(
            python_module="transformers.models.llama.modeling_llama",
            layer="LlamaDecoderLayer",
            norm="LlamaRMSNorm",
            rotary=parts.rotary,
            build_layer=parts.build_layer,
        ),
        rotary_axes=1,
        rotary_by_layer_type=False,
        rotary_kind=None,
        masks_of_distances=False,
        engines=draft_engines(kind, family.wrapper or family.name),
        engines_of=None,
    )
