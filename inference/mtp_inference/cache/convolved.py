"""Cache the inputs of short convolutions in attention layers, by position like keys.

The inputs of a rejected draft stay at positions that the next window overwrites before they are read, so rollback is
not needed.

Shapes: B rows, T tokens of the window, C channels, W kernel width, N = W - 1 + T, Z places of a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.rows import RowState
from mtp_inference.cache.window import Window, announced
from mtp_train.errors import UnsupportedModelError
from mtp_train.upstream.transformers_private import LinearAttentionLayer


class ConvolutionInputs(LinearAttentionLayer, RowState):
    """Inputs of a layer's convolutions, with the cache interface of transformers' models and of the head's.

    Args:
        num_rows: B.
        max_undecided: Longest window whose tokens may be rejected.
        num_convolutions: Number of convolutions in the layer.
    """

    def __init__(self, num_rows: int, max_undecided: int, num_convolutions: int) -> None:
        super().__init__(number_of_states=num_convolutions)
        self.num_rows = num_rows
        self.max_undecided = max_undecided
        self.window: Window | None = None
        self.rings_BZC: dict[int, Tensor] = {}
        """Index of the convolution to a ring buffer (B, Z, C): its input at position p is at place ``p % Z``."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_unused: object
    ) -> Tensor:
        """Write the window's inputs (B, C, T); return the W - 1 earlier inputs followed by them, (B, C, N)."""
        if conv_kernel_size is None:
            raise RuntimeError("convolution: no kernel size; expected one. Use transformers 5.17 or later.")
        inputs_BTC = conv_states.transpose(1, 2)
        window, num_before = announced(self.window), conv_kernel_size - 1
        ring_BZC = self._ring(inputs_BTC, state_idx, num_before)
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

    def update_recurrent_state(self, *_unused: object, **_also_unused: object) -> Tensor:
        """Refuse a recurrent state.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(
            "trunk: a layer with an attention and several convolutions keeps a recurrent state too, which cannot undo "
            "a rejected draft; expected no such state. Decode this model elsewhere."
        )

    def _ring(self, inputs_BTC: Tensor, state_idx: int, num_before: int) -> Tensor:
        if state_idx not in self.rings_BZC:
            shape = (self.num_rows, num_before + self.max_undecided, inputs_BTC.shape[-1])
            self.rings_BZC[state_idx] = inputs_BTC.new_zeros(shape)
        return self.rings_BZC[state_idx]
