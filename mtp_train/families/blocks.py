"""Head layers that transformers has no one class for, put together from the ones it has."""

from __future__ import annotations

from collections.abc import Sequence

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
