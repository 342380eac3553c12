"""Nemotron-H and Nemotron 3: Mamba-2 hybrid trunks; the head is a short pattern of layers under ``mtp.layers``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PretrainedConfig

from mtp_train.families.engines import LLAMA_CPP_POSITIONS, NO_RECURRENT_ROLLBACK, Convention, engine_table
from mtp_train.families.layouts import end_rules, with_layers
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
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


class _LayersInTurn(nn.Module):
    """Several borrowed layers that run one after the other as one layer; none of them takes position embeddings."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Run the layers, (B, T, D) to (B, T, D); arguments as in transformers' decoder layers."""
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                position_ids=position_ids,
            )
        return hidden_states


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    block = borrowed.cls(borrowed.layer)
    return _LayersInTurn([block(config, number) for number in range(len(config.layers_block_type))])


def _unlimited_time_steps(decoder: Any) -> None:
    """Remove the bound that transformers puts on time steps in a forward of several tokens.

    transformers' step of one token has no such bound, nor have the kernels of mamba_ssm, vLLM and llama.cpp.
    """
    for layer in decoder.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = (0.0, math.inf)


_SUB, _OURS, _EXPERTS = "mtp.layers.{sub}.", "layer.layers.{sub}.", "mixer.experts"
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
            *end_rules("mtp.layers.0.", final_norm=None),
            KeyRule(native="mtp.layers.{last}.final_layernorm.weight", ours="final_norm.weight"),
            *(
                KeyRule(native=f"{_SUB}{_EXPERTS}.{{expert}}.{one}.weight", ours=f"{_OURS}{_EXPERTS}.{one}")
                for one in ("up_proj", "down_proj")
            ),
            KeyRule(native=f"{_SUB}{{rest}}", ours=f"{_OURS}{{rest}}"),
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
        borrowed=Borrowed.of(
            "nemotron_h",
            "NemotronH",
            layer="Block",
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
    engines=engine_table(transformers=NO_RECURRENT_ROLLBACK),
)
