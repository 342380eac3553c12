"""Cache the inputs of short convolutions, and the last tokens, in rings by position.

Shapes: B rows, T tokens of the window, C channels, W kernel width, N = W - 1 + T, M tokens before a window, Z places of
a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.recurrent import RecurrentStore
from mtp_inference.cache.rows import PlacedState, RowState
from mtp_inference.cache.window import Window
from mtp_train.upstream.transformers_private import LinearAttentionLayer


class ConvolutionInputs(LinearAttentionLayer, PlacedState):
    """Inputs of a layer's convolutions, with the cache interface of transformers' models and of the head's.

    Args:
        max_undecided: Longest window whose tokens may be rejected.
    """

    def __init__(self, num_rows: int, max_undecided: int, num_convolutions: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=num_convolutions)
        PlacedState.__init__(self, num_rows)
        self.max_undecided = max_undecided

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **_unused: object
    ) -> Tensor:
        """Write the window's inputs (B, C, T); return the W - 1 earlier inputs followed by them, (B, C, N)."""
        inputs_BTC = conv_states.transpose(1, 2)
        window, num_before = self.window, conv_kernel_size - 1
        ring_BZC = self.ring(state_idx, inputs_BTC, num_before)
        before_W = torch.arange(-num_before, 0, device=inputs_BTC.device)
        positions_BN = torch.cat([window.positions_BT[:, :1] + before_W, window.positions_BT], dim=1)
        places_BN = positions_BN % ring_BZC.shape[1]
        known_BNC = torch.cat([ring_BZC[window.row_index_B1, places_BN[:, :num_before]], inputs_BTC], dim=1)
        num_kept = min(window.num_tokens, ring_BZC.shape[1])
        ring_BZC[window.row_index_B1, places_BN[:, -num_kept:]] = inputs_BTC[:, -num_kept:]
        # Positions below 0 have no input. Rows of a chained module may start there.
        return known_BNC.masked_fill((positions_BN < 0)[..., None], 0.0).transpose(1, 2)

    def taps(self, inputs_BTC: Tensor, conv_idx: int, width: int) -> list[Tensor]:
        """Write the window's inputs; return the last ``width`` inputs up to each token, the token's own first."""
        known_BNC = self.update_conv_state(inputs_BTC.transpose(1, 2), conv_idx, width).transpose(1, 2)
        num_tokens = inputs_BTC.shape[1]
        return [known_BNC[:, first : first + num_tokens] for first in range(width - 1, -1, -1)]

    def ring(self, state_idx: int, like_BT: Tensor, num_before: int) -> Tensor:
        """Return the ring buffer (B, Z, ...) of a state: what belongs to position p is at place ``p % Z``."""
        return self.buffer(state_idx, like_BT, num_before + self.max_undecided)


_CONVOLUTION, _TOKENS = 1, 2
NGRAM_STATES = 3
"""States of such a layer: the recurrent layer's own convolution, a second convolution, and tokens."""


class NgramStore(RowState, RecurrentStore):
    """State of a recurrent layer with a second convolution that also reads the tokens before a window (Qwen4-Exp)."""

    def __init__(self, num_rows: int, max_undecided: int) -> None:
        super().__init__()
        self.number_of_states = NGRAM_STATES
        self._inputs = ConvolutionInputs(num_rows, max_undecided, NGRAM_STATES)
        for state in (_CONVOLUTION, _TOKENS):
            self.conv_states[state] = None
            self.is_conv_states_initialized[state] = self.has_previous_state[state] = False

    def begin(self, window: Window) -> None:
        """Expose the states of the window's rows, and the tokens before the window, to the model."""
        super().begin(window)
        self._inputs.window = window
        # Not every such layer reads tokens.
        earlier = not window.is_fresh and _TOKENS in self._inputs.buffers_BZ
        self.is_conv_states_initialized[_TOKENS] = self.has_previous_state[_TOKENS] = earlier
        self.conv_states[_TOKENS] = self._tokens_before(window) if earlier else None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **unused: object
    ) -> Tensor:
        """Store the window's inputs; return them after the earlier inputs, (B, C, W + T), and tokens unchanged."""
        if state_idx == _TOKENS:
            self._write_tokens(conv_states, conv_kernel_size)
            return conv_states
        if state_idx == _CONVOLUTION:
            # This convolution reads ``conv_kernel_size`` earlier inputs, not one less as others do.
            return self._inputs.update_conv_state(conv_states, state_idx, conv_kernel_size + 1)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **unused)

    def _tokens_before(self, window: Window) -> Tensor:
        ring_BZ = self._inputs.buffers_BZ[_TOKENS]
        num_before = ring_BZ.shape[1] - self._inputs.max_undecided
        positions_BM = window.positions_BT[:, :1] + torch.arange(-num_before, 0, device=ring_BZ.device)
        return ring_BZ[window.row_index_B1, positions_BM % ring_BZ.shape[1]]

    def _write_tokens(self, tokens_BT: Tensor, num_before: int) -> None:
        """Store the last tokens of a window, padding included if the text is shorter."""
        window, ring_BZ = self._inputs.window, self._inputs.ring(_TOKENS, tokens_BT, num_before)
        num_places = ring_BZ.shape[1]
        kept_BT = tokens_BT[:, -num_places:]
        positions_BT = window.positions_BT[:, -1:] + torch.arange(1 - kept_BT.shape[1], 1, device=tokens_BT.device)
        ring_BZ[window.row_index_B1, positions_BT % num_places] = kept_BT
