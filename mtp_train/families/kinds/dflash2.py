"""DFlash 2 drafters: DFlash drafters with convolutions along the block, and a selector of the best tokens.

:mod:`mtp_train.heads.dflash2` runs them. The formats are those of DFlash. They are decoded with, and not trained.

Shapes: B rows, T tokens of a block, D hidden, K taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mtp_train.families.kinds.dflash import DFLASH


class BlockConvolutions(nn.Module):
    """The convolutions before and after one part of a layer; both kernels are computed from what the first reads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps, width, self.group_size = config.conv_kernel_size, config.hidden_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group_size), bias=False)

    def forward(self, read_BTD: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output of the part, (B, T, D), between the two convolutions."""
        deltas = self.kernel_projection(read_BTD).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before_BTKD, after_BTKD = (self.base_kernel + deltas.repeat_interleave(self.group_size, dim=-1)).unbind(2)
        return convolved(part(convolved(read_BTD, before_BTKD)), after_BTKD)


def convolved(hidden_BTD: Tensor, kernel_BTKD: Tensor) -> Tensor:
    """Return the causal convolution of a block, with zeros before its first token."""
    shifted = [pad(hidden_BTD, (0, 0, back, -back)) for back in range(kernel_BTKD.shape[2])]
    return (torch.stack(shifted, dim=2) * kernel_BTKD).sum(2)


class ConvolvedLayer(nn.Module):
    """A layer with convolutions around its attention and around its MLP; keys of committed tokens have none."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.attention_conv = BlockConvolutions(config)
        self.mlp_conv = BlockConvolutions(config)

    def forward(self, hidden_BTD: Tensor, **of_attention: Any) -> Tensor:
        """Run the layer: (B, T, D) to (B, T, D); other arguments as in transformers' layers."""
        hidden_BTD = hidden_BTD + self.attention_conv(
            self.input_layernorm(hidden_BTD), lambda read_BTD: self.self_attn(read_BTD, **of_attention)[0]
        )
        return hidden_BTD + self.mlp_conv(self.post_attention_layernorm(hidden_BTD), self.mlp)


DFLASH2 = replace(
    DFLASH,
    head="mtp_train.heads.dflash2:DFlash2Head",
    layer=replace(
        DFLASH.layer,
        build_layer=lambda classes, config, layer_idx: ConvolvedLayer(classes.stock_layer(config, layer_idx), config),
    ),
    format=replace(
        DFLASH.format,
        written_as=("DFlash2DraftModel",),
        read_as=(),
        plain_settings={
            **DFLASH.format.plain_settings,
            "speculators_model_type": ("dflash2", None),
            "input_embedding_scale": (None, 1.0),
            "output_multiplier": (None, 1.0),
            "final_logit_softcapping": (None, 0.0),
        },
    ),
)
