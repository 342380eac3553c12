"""EAGLE heads (arXiv:2401.15077): one Llama layer without its first norm, whose output the trunk's lm_head reads.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.drafts import llama
from mtp_train.families.drafts.record import Block, DraftFormat, DraftParts
from mtp_train.families.engines import EngineSupport
from mtp_train.families.spec import Family, HeadLayer, KeyRule


class EagleModule(Block):
    """``z = layer(fc [e, h])``; the trunk's lm_head reads ``z`` without a norm."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * layer_config.hidden_size, layer_config.hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return ``fc [e, h]``, (B, T, D)."""
        fused_BTD: Tensor = self.proj(torch.cat([embed_BTD, hidden_BTD], dim=-1))
        return fused_BTD


def _without_input_norm(borrowed: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: nn.Module = borrowed.stock_layer(config, layer_idx)
    layer.set_submodule("input_layernorm", nn.Identity())
    return layer


def _serving(trunk: str) -> Mapping[str, EngineSupport]:
    return {
        "vllm": llama.in_vllm("eagle") if trunk in llama.LAST_STATES_IN_VLLM else llama.UNVERIFIED,
        "sglang": llama.in_sglang("EAGLE") if trunk in llama.LAST_STATES_IN_SGLANG else llama.UNVERIFIED,
        "llama.cpp": llama.NO_EAGLE,
        "transformers": llama.NO_EAGLE,
    }


PARTS = DraftParts(
    prefixes=("fc.", "layers."),
    rules=(
        KeyRule(native="fc.weight", ours="proj.weight"),
        KeyRule(native="layers.{module}.{rest}", ours="layer.{rest}"),
    ),
    module=EagleModule,
    layer=llama.llama_layer(_without_input_norm),
    serving=_serving,
    format=DraftFormat(
        # SGLang has its own name for EAGLE heads.
        written_as=("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
        config=lambda layer_config, num_modules, trunk, num_drafted: llama.llama_draft_config(layer_config, trunk),
        has_output=False,
        plain_settings=llama.PLAIN_SETTINGS,
        # SGLang's projection has a bias. vLLM's has none, and ignores a stored one.
        zeros=("fc.bias",),
    ),
)
