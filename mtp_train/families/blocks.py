"""Head layers that transformers has no one class for, put together from the ones it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache


class AttentionThenMlp(nn.Module):
    """A pre-norm decoder layer of an attention and an MLP that otherwise sit in a larger layer.

    Args:
        attention: Returns a tuple that begins with its output.
        mlp: Any MLP.
        norms: Before the attention, and before the MLP.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn = attention
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Run the layer; arguments and result as of transformers' decoder layers, (B, T, D)."""
        attended, *_ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
        )
        hidden_states = hidden_states + attended
        mlp_output: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + mlp_output


class LayersInTurn(nn.Module):
    """Several borrowed layers as one, none of which asks for positions.

    Args:
        layers: Each with its own norm and residual.
    """

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
        """Run the layers; arguments and result as of transformers' decoder layers, (B, T, D)."""
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                position_ids=position_ids,
            )
        return hidden_states


class Eagle3Layer(nn.Module):
    """EAGLE-3's layer (arXiv:2503.01840): its attention reads the token's embedding beside the state.

    Args:
        layer: A pre-norm decoder layer as Llama's; its attention is widened to twice what it read.
        hidden_norm: Of the state, where the layer's own first norm is of the embedding.
        adds_normed: Whether what the attention says is added to the normed state (``norm_before_residual``, as
            speculators trains many), and not to the state as it comes, as the paper's authors do.
    """

    def __init__(self, layer: Any, hidden_norm: nn.Module, *, adds_normed: bool) -> None:
        super().__init__()
        self.adds_normed = adds_normed
        self.input_layernorm, self.hidden_norm = layer.input_layernorm, hidden_norm
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn.get_submodule(name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            self.self_attn.set_submodule(name, wide)
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(
        self,
        embedding_and_state: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Run the layer: (B, T, 2 D), embedding first, to (B, T, D); the rest as of transformers' decoder layers."""
        embed_BTD, hidden_BTD = embedding_and_state.chunk(2, dim=-1)
        normed_BTD = self.hidden_norm(hidden_BTD)
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embed_BTD), normed_BTD], dim=-1),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
        )
        hidden_BTD = (normed_BTD if self.adds_normed else hidden_BTD) + attended
        mlp_output: Tensor = self.mlp(self.post_attention_layernorm(hidden_BTD))
        return hidden_BTD + mlp_output


class ResidualBlock(nn.Module):
    """Medusa's block (arXiv:2401.10774, section 2.1.1): ``x + SiLU(W x + b)``, which begins as the identity.

    Args:
        hidden_size: D.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Run the block, (B, T, D); no token sees another."""
        return hidden_states + nn.functional.silu(self.linear(hidden_states))
