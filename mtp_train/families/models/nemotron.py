"""Nemotron-H and Nemotron 3: Mamba-2 hybrid trunks; the head is a short pattern of layers under ``mtp.layers``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.blocks import LayersInTurn
from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import NO_RECURRENT_ROLLBACK, engine_table
from mtp_train.families.layouts import with_layers
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    RawConfig,
    RecurrentKernels,
    TrunkTraits,
    Wiring,
)

_PATTERN = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")


def _num_sublayers(text_config: RawConfig) -> int:
    """Return the length of the head's layer pattern, a list or one letter per layer; default: attention, experts."""
    return next((len(text_config[field]) for field in _PATTERN if text_config.get(field)), 2)


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layers_block_type=list(text_config.mtp_layers_block_type))


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    block = borrowed.cls(borrowed.layer)
    return LayersInTurn([block(config, number) for number in range(len(config.layers_block_type))])


def _unlimited_time_steps(decoder: Any) -> None:
    """Remove the bound that transformers puts on time steps in a forward of several tokens.

    transformers' step of one token has no such bound, nor have the kernels of mamba_ssm, vLLM and llama.cpp.
    """
    for layer in decoder.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = (0.0, math.inf)


_SUB = "mtp.layers.{sub}."
NEMOTRON_H = Family(
    name="nemotron_h",
    title="Nemotron-H / Nemotron 3",
    model_types=("nemotron_h",),
    declaration=Declaration(count="num_nextn_predict_layers", others=_PATTERN),
    keys=Keys(
        trunk_prefixes=("backbone.", "model."),
        embed="{trunk}embeddings.weight",
        head_prefixes=("mtp.",),
        rules=(
            KeyRule(native="mtp.layers.0.eh_proj.weight", ours="proj.weight"),
            KeyRule(native="mtp.layers.0.enorm.weight", ours="embed_norm.weight"),
            KeyRule(native="mtp.layers.0.hnorm.weight", ours="hidden_norm.weight"),
            KeyRule(native="mtp.layers.{last}.final_layernorm.weight", ours="final_norm.weight"),
            KeyRule(
                native=f"{_SUB}mixer.experts.{{expert}}.up_proj.weight",
                ours="layer.layers.{sub}.mixer.experts.up_proj",
                stack="experts",
            ),
            KeyRule(
                native=f"{_SUB}mixer.experts.{{expert}}.down_proj.weight",
                ours="layer.layers.{sub}.mixer.experts.down_proj",
                stack="experts",
            ),
            KeyRule(native=f"{_SUB}{{rest}}", ours="layer.layers.{sub}.{rest}"),
        ),
        num_sublayers=_num_sublayers,
    ),
    wiring=Wiring(
        # llama.cpp computes the final norm as a LayerNorm, the other engines like the layers' RMSNorm.
        conventions={
            "vllm": Convention(),
            "sglang": Convention(),
            "llama.cpp": replace(LLAMA_CPP_POSITIONS, centred=True),
        },
    ),
    layer=HeadLayer(
        config=_head_layer_config,
        borrowed=Borrowed(
            python_module="transformers.models.nemotron_h.modeling_nemotron_h",
            layer="NemotronHBlock",
            norm="NemotronHRMSNorm",
            rotary=None,
            norm_eps="layer_norm_epsilon",
            build_layer=_build_layer,
        ),
    ),
    trunk=TrunkTraits(
        final_norm="norm_f",
        prepare=_unlimited_time_steps,
        masks_by_layer_type=True,
        recurrent=RecurrentKernels(
            chunked="mamba2_chunk_scan",
            single="mamba2_selective_state_update",
            conv="causal_conv1d_fn",
            rule="mamba2",
        ),
        needs_transformers="5.23",
    ),
    engines=Engines(support=engine_table(transformers=NO_RECURRENT_ROLLBACK)),
)
