"""Head layers that transformers has no single class for, composed of the classes that it has."""

from __future__ import annotations

from collections.abc import Sequence

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
