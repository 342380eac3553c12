"""The recurrent layers of a cache, able to go back inside the last window.

All layers keep their states in one pair of buffers, so that a window of all layers is committed at once: its operations
are small, and a layer more makes them no slower.

Shapes: L layers, B rows, R = L * B, T tokens of the window, N = W + T, C channels, W kernel width, H heads, Kd key
width, Vd value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from mtp_inference.recurrent import Undecided
from mtp_inference.window import Window, announced


class RecurrentStore(LinearAttentionLayer):
    """One recurrent layer with a convolution, as transformers' models see it.

    ``conv_BCW`` holds the convolution's last inputs, ``state_BHKV`` the recurrent state, of all rows: views of the
    buffers that all layers share, there once a first window was committed.
    """

    def __init__(self) -> None:
        super().__init__()
        # transformers then hands over the convolution's inputs also for a single token.
        self.activate_past_recording()
        self.conv_BCW: Tensor | None = None
        self.state_BHKV: Tensor | None = None
        self._window_conv: Tensor | None = None
        self._window_state: Tensor | Undecided | None = None
        self._in_place = False

    def begin(self, window: Window) -> None:
        """Show the model the states of the window's rows."""
        earlier = not window.is_fresh
        self._in_place = earlier and window.num_tokens == 1
        self.has_previous_state[0] = earlier
        for ours, shown, known in (
            (self.conv_BCW, self.conv_states, self.is_conv_states_initialized),
            (self.state_BHKV, self.recurrent_states, self.is_recurrent_states_initialized),
        ):
            known[0] = earlier
            shown[0] = ours[window.rows] if earlier and ours is not None else None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_unused: object
    ) -> Tensor:
        """Return the inputs before the window and those of the window, (B, C, W + T)."""
        if conv_kernel_size is None:
            raise RuntimeError("convolution: no kernel size; expected one. Use transformers 5.17 or later.")
        before = self.conv_states[state_idx]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        self._window_conv = torch.cat([before, conv_states], dim=-1)
        return self._window_conv

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **_unused: object) -> Any:
        """Take what the kernel returned: the state after the window's last token, or the window, undecided."""
        self._window_state = recurrent_states
        return recurrent_states

    def take_window(self) -> tuple[Tensor, Tensor | Undecided]:
        """Hand over the convolution's inputs, (B, C, W + T), and what the kernel returned."""
        conv, state = self._window_conv, self._window_state
        self._window_conv = self._window_state = None
        # Some models hand over nothing of a single token: they have changed what :meth:`begin` showed them.
        if conv is None and self._in_place:
            conv = torch.nn.functional.pad(self._shown(self.conv_states), (1, 0))
        if state is None and self._in_place:
            state = self._shown(self.recurrent_states)
        if conv is None or state is None:
            raise RuntimeError("recurrent cache: no window ran; expected one forward before every commit.")
        return conv, state

    @staticmethod
    def _shown(states: Any) -> Tensor:
        shown: Tensor = states[0]
        return shown


class States(NamedTuple):
    """The states of all layers."""

    conv_LBCW: Tensor
    state_LBHKV: Tensor


class RecurrentLayers:
    """The recurrent layers of one cache.

    Args:
        stores: The layers; all of one shape.
        num_rows: B.
        conv_dtype: Of the convolutions' inputs as they are kept; None for that of the first window.
    """

    def __init__(self, stores: Sequence[RecurrentStore], num_rows: int, conv_dtype: torch.dtype | None = None) -> None:
        self.stores = list(stores)
        self.num_rows = num_rows
        self.conv_dtype = conv_dtype
        self._window: Window | None = None
        self._states: States | None = None

    def begin(self, window: Window) -> None:
        """Announce the next window."""
        self._window = window
        for store in self.stores:
            store.begin(window)

    def commit(self, num_kept_B: Tensor | None) -> None:
        """Keep the first tokens of the window, all of them for None. A window of one token is always kept."""
        if not self.stores:
            return
        taken = [store.take_window() for store in self.stores]
        conv = [inputs for inputs, _ in taken]
        decided = [state for _, state in taken if isinstance(state, Tensor)]
        undecided = [state for _, state in taken if not isinstance(state, Tensor)]
        if undecided:
            self._commit_undecided(torch.stack(conv), undecided, num_kept_B)
        else:
            self._commit_decided(conv, decided, num_kept_B)

    def snapshot(self) -> States | None:
        """Return a copy of the states."""
        return None if self._states is None else States(*(buffer.clone() for buffer in self._states))

    def restore(self, states: States | None) -> None:
        """Go back to a snapshot."""
        if self._states is not None and states is not None:
            for buffer, saved in zip(self._states, states, strict=True):
                buffer.copy_(saved)

    def _commit_decided(self, conv: list[Tensor], state: list[Tensor], num_kept_B: Tensor | None) -> None:
        window = announced(self._window)
        if num_kept_B is not None and window.num_tokens > 1:
            raise RuntimeError(
                f"recurrent cache: a window of {window.num_tokens} tokens, already decided; expected it undecided. Run "
                "it under undecided_states()."
            )
        # Sliced before it is stacked: the inputs of a long prompt are large.
        conv_LBCW = torch.stack([inputs[..., window.num_tokens :] for inputs in conv])
        states = self._states or self._allocate(conv_LBCW, state[0])
        # In place, here and below: a captured round knows these buffers by their address.
        states.conv_LBCW[:, window.rows] = conv_LBCW
        for ours_BHKV, new_BHKV in zip(states.state_LBHKV[:, window.rows], state, strict=True):
            # A single token's rule has updated it in place.
            if new_BHKV.data_ptr() != ours_BHKV.data_ptr():
                ours_BHKV.copy_(new_BHKV)

    def _commit_undecided(self, conv_LBCN: Tensor, windows: Sequence[Undecided], num_kept_B: Tensor | None) -> None:
        window, states = announced(self._window), self._states
        num_layers, num_rows, channels, _ = conv_LBCN.shape
        if states is None or num_rows != self.num_rows:
            raise RuntimeError("recurrent cache: undecided; expected a prefill of all rows first, and all rows now.")
        if num_kept_B is None:
            num_kept_B = torch.full((num_rows,), window.num_tokens, device=conv_LBCN.device)
        # A row out of use may claim anything. Layers are so many more rows from here on.
        num_kept_R = num_kept_B.clamp(0, window.num_tokens).repeat(num_layers)
        state_RHKV = states.state_LBHKV.flatten(0, 1)
        windows[0].joined(windows, state_RHKV).commit(num_kept_R, state_RHKV)
        taken_RW = num_kept_R[:, None] + torch.arange(states.conv_LBCW.shape[-1], device=conv_LBCN.device)
        kept_RCW = conv_LBCN.flatten(0, 1).gather(2, taken_RW[:, None].expand(-1, channels, -1))
        states.conv_LBCW.copy_(kept_RCW.view_as(states.conv_LBCW))

    def _allocate(self, conv_LBCW: Tensor, state_BHKV: Tensor) -> States:
        def zeros(like: Tensor, shape: torch.Size) -> Tensor:
            return like.new_zeros(len(self.stores), self.num_rows, *shape)

        conv_LBCW = conv_LBCW.to(self.conv_dtype or conv_LBCW.dtype)
        self._states = States(zeros(conv_LBCW, conv_LBCW.shape[2:]), zeros(state_BHKV, state_BHKV.shape[1:]))
        for store, conv_BCW, state_BHKV in zip(self.stores, *self._states, strict=True):
            store.conv_BCW, store.state_BHKV = conv_BCW, state_BHKV
        return self._states
