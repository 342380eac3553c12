"""Medusa heads (arXiv:2401.10774): one residual block per depth, followed by the trunk's lm_head instead of its own.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.engines import Convention, no, remarked
from mtp_train.families.kinds.kind import Block, DraftFormat, DraftParts
from mtp_train.families.kinds.llama import LAST_STATES_IN_VLLM, UNVERIFIED, draft_layer, in_vllm
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Family, Wiring


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)`` (section 2.1.1). Zero weights make it the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        """Run the block, (B, T, D) to (B, T, D); every token is processed on its own."""
        return hidden_states + nn.functional.silu(self.linear(hidden_states))


class MedusaModule(Block):
    """A residual block of the trunk's state; drafted tokens are no input."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.layer = family.classes.make_layer(layer_config, module_idx)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return the state, (B, T, D)."""
        return hidden_BTD


MEDUSA = DraftParts(
    prefixes=("blocks.",),
    rules=key_rules("blocks.", {"{module}.layers.0.{rest}": "layer.linear.{rest}"}),
    module=MedusaModule,
    layer=draft_layer(build_layer=lambda classes, config, layer_idx: ResidualBlock(config.hidden_size), rotary=None),
    wiring=Wiring(final_norm=False, default=Convention(recycle="trunk")),
    serving={"vllm": (remarked(in_vllm("medusa"), "  # vLLM 0.32; 0.33 has no Medusa"), LAST_STATES_IN_VLLM)},
    other_trunks=UNVERIFIED,
    other_engines=no("has no Medusa"),
    format=DraftFormat(
        written_as=("MedusaModel",),
        config=lambda layer_config, num_modules, trunk, num_drafted: {
            "model_type": "medusa",
            "hidden_size": layer_config.hidden_size,
            "num_heads": num_modules,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "truncated_vocab_size": layer_config.vocab_size,
        },
        modules_field="num_heads",
        # vLLM 0.32 has code for a list of tokens, and then reports the list as missing: none is written.
        drafted_field="truncated_vocab_size",
        has_layer=False,
    ),
)
