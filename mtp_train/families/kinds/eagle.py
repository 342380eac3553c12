"""EAGLE heads (arXiv:2401.15077): one Llama layer without its first norm, whose output the trunk's lm_head reads.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.kinds import llama
from mtp_train.families.kinds.kind import Block, DraftFormat, DraftParts
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Family, HeadLayer, Wiring


class EagleModule(Block):
    """``z = layer(fc [e, h])``; the trunk's lm_head reads ``z`` without a norm."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * layer_config.hidden_size, layer_config.hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return ``fc [e, h]``, (B, T, D)."""
        return self.proj(torch.cat([embed_BTD, hidden_BTD], dim=-1))


def _without_input_norm(classes: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer = classes.stock_layer(config, layer_idx)
    layer.set_submodule("input_layernorm", nn.Identity())
    return layer


EAGLE = DraftParts(
    prefixes=("fc.", "layers."),
    rules=key_rules("", {"fc.weight": "proj.weight", "layers.{module}.{rest}": "layer.{rest}"}),
    module=EagleModule,
    layer=llama.draft_layer(build_layer=_without_input_norm),
    wiring=Wiring(final_norm=False),
    serving={
        "vllm": (llama.in_vllm("eagle"), llama.LAST_STATES_IN_VLLM),
        "sglang": (llama.in_sglang("EAGLE"), llama.LAST_STATES_IN_SGLANG),
    },
    other_trunks=llama.UNVERIFIED,
    other_engines=llama.NO_EAGLE,
    format=DraftFormat(
        # SGLang has its own name for EAGLE heads.
        written_as=("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
        config=lambda layer_config, num_modules, trunk, num_drafted: llama.draft_config(layer_config, trunk),
        has_output=False,
        plain_settings=llama.PLAIN_SETTINGS,
        # SGLang's projection has a bias. vLLM's has none, and ignores a stored one.
        zeros=("fc.bias",),
    ),
)
