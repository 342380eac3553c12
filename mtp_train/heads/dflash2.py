"""Run a DFlash 2 drafter: a DFlash drafter with convolutions along its block, and a selector of the best tokens.

A layer's attention and its MLP each stand between two causal convolutions, whose kernels depend on the token. The
selector adds a score to the best tokens of each row, computed from the state of the row and the token before its draft.
Other tokens are not drafted. As in the speculators package (``models/dflash2/model_definitions.py``).

Shapes: B rows, T tokens of a block, D hidden, G groups of channels, K taps, R rank, C candidates, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mtp_train.families import Family
from mtp_train.heads.dflash import Correct, DFlashHead, DFlashModule


class BlockConvolutions(nn.Module):
    """The convolutions before and after one part of a layer; both kernels are computed from the input of the first."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps, width, self.group_size = config.conv_kernel_size, config.hidden_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group_size), bias=False)

    def kernels(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernels of both convolutions, each (B, T, K, D)."""
        _, taps, width = self.base_kernel.shape
        deltas = self.kernel_projection(hidden_BTD).unflatten(-1, (2, taps, width // self.group_size))
        before, after = (self.base_kernel + deltas.repeat_interleave(self.group_size, dim=-1)).unbind(2)
        return before, after


def convolved(hidden_BTD: Tensor, kernel_BTKD: Tensor) -> Tensor:
    """Return the causal convolution of a block, with zeros before its first token."""
    length = hidden_BTD.shape[1]
    taps = (pad(hidden_BTD, (0, 0, back, 0))[:, :length] for back in range(kernel_BTKD.shape[2]))
    return (torch.stack([*taps], dim=2) * kernel_BTKD).sum(2)


class ConvolvedLayer(nn.Module):
    """A layer with convolutions around its attention and around its MLP; keys of committed tokens have none."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.attention_conv, self.mlp_conv = BlockConvolutions(config), BlockConvolutions(config)

    def forward(self, hidden_BTD: Tensor, **of_attention: Any) -> Tensor:
        """Run the layer: (B, T, D) to (B, T, D); other arguments as in transformers' layers."""
        read_BTD = self.input_layernorm(hidden_BTD)
        before, after = self.attention_conv.kernels(read_BTD)
        attended_BTD, _ = self.self_attn(hidden_states=convolved(read_BTD, before), **of_attention)
        hidden_BTD = hidden_BTD + convolved(attended_BTD, after)
        read_BTD = self.post_attention_layernorm(hidden_BTD)
        before, after = self.mlp_conv.kernels(read_BTD)
        return hidden_BTD + convolved(self.mlp(convolved(read_BTD, before)), after)


class CandidateSelector(nn.Module):
    """Score the best tokens of a row by the token before them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_candidates = config.selector_top_k
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits_B1V: Tensor, token_B1: Tensor, state_B1D: Tensor) -> Tensor:
        """Return the logits with the scores of the candidates added, (B, 1, V), minus infinity for other tokens."""
        best = logits_B1V.topk(self.num_candidates, dim=-1)
        context_B1R = self.predecessor_codebook[token_B1] * self.hidden_projection(state_B1D)
        scores_B1C = (self.successor_codebook[best.indices] @ context_B1R[..., None]).squeeze(-1)
        nothing = torch.full_like(logits_B1V, -torch.inf)
        return nothing.scatter(-1, best.indices, best.values + scores_B1C)


class DFlash2Module(DFlashModule):
    """DFlash's module, with convolutions in its layers, and a selector."""

    def __init__(self, family: Family, config: Any, num_states: int) -> None:
        super().__init__(family, config, num_states)
        self.candidate_selector = CandidateSelector(config)

    def wrapped(self, layer: nn.Module, config: Any) -> nn.Module:
        return ConvolvedLayer(layer, config)


class DFlash2Head(DFlashHead):
    """A DFlash 2 drafter as a head."""

    module_class = DFlash2Module

    def correcting(self, states_BTD: Tensor, anchor_B1: Tensor) -> Correct:
        select = cast(DFlash2Module, self.module).candidate_selector
        return lambda row, logits_B1V, token_B1: select(logits_B1V, token_B1, states_BTD[:, row : row + 1])
