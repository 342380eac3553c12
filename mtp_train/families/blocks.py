"""Head layers that transformers has no single class for, composed of the classes that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache


class AttentionThenMlp(nn.Module):
    """A pre-norm decoder layer, composed of an attention and an MLP that transformers has only in larger layers.

    Args:
        attention: A module that returns a tuple with the attention's output as first element.
        mlp: Any MLP.
        norms: The norm in front of the attention, and the norm in front of the MLP.
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
        """Run the layer, (B, T, D) to (B, T, D); arguments as in transformers' decoder layers."""
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
    """Several borrowed layers that run one after the other as one layer; none of them takes position embeddings.

    Args:
        layers: Layers with their own norm and residual connection.
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
        """Run the layers, (B, T, D) to (B, T, D); arguments as in transformers' decoder layers."""
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                position_ids=position_ids,
            )
        return hidden_states


class Eagle3Layer(nn.Module):
    """EAGLE-3's layer (arXiv:2503.01840): its attention reads the embedding and the hidden state, concatenated.

    Args:
        layer: A pre-norm decoder layer like Llama's. The input of its attention is widened to twice its width.
        hidden_norm: Norm of the hidden state. The layer's own first norm becomes the norm of the embedding.
        adds_normed: Whether the attention's output is added to the normed hidden state (``norm_before_residual``, which
            speculators sets in many checkpoints) or, as in the paper, to the hidden state itself.
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
        """Run the layer: (B, T, 2 D), embedding first, to (B, T, D); other arguments as in transformers' layers."""
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
    """Medusa's block (arXiv:2401.10774, section 2.1.1): ``x + SiLU(W x + b)``. Zero weights make it the identity.

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
        """Run the block, (B, T, D) to (B, T, D); every token is processed on its own."""
        return hidden_states + nn.functional.silu(self.linear(hidden_states))
