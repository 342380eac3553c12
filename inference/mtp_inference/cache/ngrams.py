"""Cache of recurrent layers that also embed the last tokens (Qwen4-Exp): their extra inputs are stored by position.

Shapes: B rows, T tokens of the window, C channels, W kernel width, M tokens before a window, Z places of a ring.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mtp_inference.cache.convolved import ConvolutionInputs
from mtp_inference.cache.recurrent import RecurrentStore
from mtp_inference.cache.rows import RowState
from mtp_inference.cache.window import Window, announced

_CONVOLUTION, _TOKENS = 1, 2
NGRAM_STATES = 3
"""States of such a layer: the recurrent layer's own convolution, a second convolution, and tokens."""


class NgramStore(RowState, RecurrentStore):
    """State of a recurrent layer with a second convolution that also reads the tokens before a window.

    Entries of a rejected draft stay at positions that the next window overwrites before they are read.

    Args:
        num_rows: B.
        max_undecided: Longest window whose tokens may be rejected.
    """

    def __init__(self, num_rows: int, max_undecided: int) -> None:
        super().__init__()
        self.num_rows, self.max_undecided = num_rows, max_undecided
        self.number_of_states = NGRAM_STATES
        self._inputs = ConvolutionInputs(num_rows, max_undecided, NGRAM_STATES)
        self._tokens_BZ: Tensor | None = None
        self._num_before = 0
        for state in (_CONVOLUTION, _TOKENS):
            self.conv_states[state] = None
            self.is_conv_states_initialized[state] = self.has_previous_state[state] = False

    def begin(self, window: Window) -> None:
        """Expose the states of the window's rows, and the tokens before the window, to the model."""
        super().begin(window)
        self._inputs.window = window
        earlier = not window.is_fresh and self._tokens_BZ is not None
        self.is_conv_states_initialized[_TOKENS] = self.has_previous_state[_TOKENS] = earlier
        self.conv_states[_TOKENS] = self._before(window) if earlier else None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **unused: object
    ) -> Tensor:
        """Store the window's inputs; return them after the earlier inputs, (B, C, W + T), and tokens unchanged."""
        if state_idx == _TOKENS and conv_kernel_size is not None:
            self._write(conv_states, conv_kernel_size)
            return conv_states
        if state_idx == _CONVOLUTION and conv_kernel_size is not None:
            # This convolution reads ``conv_kernel_size`` earlier inputs, not one less as others do.
            return self._inputs.update_conv_state(conv_states, state_idx, conv_kernel_size + 1)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **unused)

    def placed(self) -> Iterable[Tensor]:
        """Return the ring buffers: inputs of the second convolution, and tokens. Each (B, Z, ...)."""
        return [*self._inputs.rings_BZC.values(), *([] if self._tokens_BZ is None else [self._tokens_BZ])]

    def _before(self, window: Window) -> Tensor | None:
        if self._tokens_BZ is None:
            return None
        before_M = torch.arange(-self._num_before, 0, device=self._tokens_BZ.device)
        places_BM = (window.positions_BT[:, :1] + before_M) % self._tokens_BZ.shape[1]
        return self._tokens_BZ[window.row_index_B1, places_BM]

    def _write(self, tokens_BT: Tensor, num_before: int) -> None:
        """Store the last tokens of a window, padding included if the text is shorter."""
        window = announced(self._inputs.window)
        if self._tokens_BZ is None:
            self._num_before = num_before
            self._tokens_BZ = tokens_BT.new_zeros(self.num_rows, num_before + self.max_undecided)
        num_places = self._tokens_BZ.shape[1]
        kept_BT = tokens_BT[:, -num_places:]
        back_T = torch.arange(1 - kept_BT.shape[1], 1, device=tokens_BT.device)
        self._tokens_BZ[window.row_index_B1, (window.positions_BT[:, -1:] + back_T) % num_places] = kept_BT
