"""The trunk's cache: what transformers keeps, with the rollback that speculative decoding needs.

Every round appends a window of tokens and then keeps a prefix of it. Attention layers drop the last keys and values.
A recurrent layer has no such axis: it picks the state after the last kept token (see ``recurrent.py``), and its
convolution keeps the inputs of the window until it is known which of them count.

Shapes: T tokens of the window, B rows, H heads, Kd key width, Vd value width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from mtp_train.errors import UnsupportedModelError


class RecurrentLayer(LinearAttentionLayer):
    """Cache of one recurrent layer with a convolution, able to go back inside the last window."""

    def __init__(self) -> None:
        super().__init__()
        # transformers keeps the convolution's inputs of a window until the next crop.
        self.activate_past_recording()
        self.window_states: Tensor | None = None

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_unused: object) -> Tensor:
        """Store what the kernel returned: a state per token, (T, B, H, Kd, Vd), or the last alone, (B, H, Kd, Vd)."""
        self.window_states = recurrent_states if recurrent_states.ndim == 5 else recurrent_states[None]
        last: Tensor = self.window_states[-1]
        self.recurrent_states[state_idx] = last
        self.is_recurrent_states_initialized[state_idx] = True
        return last

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens of the window (transformers counts them negatively)."""
        super().crop(tokens_to_remove)
        states = self.window_states
        if states is None or states.shape[0] + tokens_to_remove < 1:
            num_states = 0 if states is None else states.shape[0]
            raise RuntimeError(
                f"recurrent cache: {-tokens_to_remove} tokens to drop, {num_states} states kept; expected a state "
                "after the last kept token. Run the window under per_token_states() and commit once after it."
            )
        self.recurrent_states[0] = states[states.shape[0] + tokens_to_remove - 1]
        self.window_states = None


class RollbackCache(DynamicCache):
    """transformers' dynamic cache, committed window by window.

    After every trunk forward, call :meth:`commit` once. The recurrent state is ``layers[i].recurrent_states[0]``, the
    convolution's inputs ``layers[i].conv_states[0]`` (at most its kernel width), as in transformers.

    Args:
        config: The trunk's text config.

    Raises:
        UnsupportedModelError: A layer keeps state of a kind that cannot be rolled back here.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            self.layers[index] = _rollback_layer(layer, index)

    def commit(self, num_rejected: int) -> None:
        """Keep the last window except its last ``num_rejected`` tokens."""
        self.crop(-num_rejected)


def _rollback_layer(layer: Any, index: int) -> DynamicLayer | RecurrentLayer:
    if type(layer) is DynamicLayer:
        return layer
    if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
        return RecurrentLayer()
    raise UnsupportedModelError(
        f"trunk layer {index}: keeps its state in a {type(layer).__name__}, which cannot undo a rejected draft; "
        "expected full attention or a recurrent layer with one state. Decode this model without speculation."
    )
