"""The cache of a batch: fixed buffers, a window at a time, with the rollback that speculative decoding needs.

Every forward is a window (see ``window.py``): announce it with :meth:`WindowCache.begin`, run the model, then
:meth:`WindowCache.commit` how many tokens of it each row keeps. Attention layers have nothing to do then: the next
window writes over what was rejected. A recurrent layer adds the kept tokens to its state (see ``recurrent.py``), and
its convolution moves on to the inputs before the next. Rows are independent: they may stand at different positions and
keep different numbers of tokens.

Shapes: B rows, T tokens of the window, S slots, C channels, W kernel width, H heads, Kd key width, Vd value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from mtp_inference.recurrent import Undecided
from mtp_inference.window import Window
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.step import KeysWritten


class AttentionStore(CacheLayerMixin):
    """Keys and values of one attention layer, (B, H, S, width), allocated when the first ones come.

    Args:
        num_rows: B.
        size: S.
        sliding_window: How many positions a token sees; None for all.
    """

    def __init__(self, num_rows: int, size: int, sliding_window: int | None) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.size = size
        self.sliding_window = sliding_window
        self.window: Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers."""
        heads = (self.num_rows, key_states.shape[1], self.size)
        self.keys = key_states.new_zeros(*heads, key_states.shape[-1])
        self.values = value_states.new_zeros(*heads, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_unused: object, **_also_unused: object
    ) -> tuple[Tensor, Tensor]:
        """Write the window's keys and values; return those in use, (B, H, used, width)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = _announced(self.window)
        slots_BT = window.positions_BT % self.size
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[window.row_index_B1, :, slots_BT] = new.transpose(1, 2)
        if window.keys_only:
            raise KeysWritten
        used = min(window.used, self.size)
        return self.keys[window.rows, :, :used], self.values[window.rows, :, :used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys in use and the first one's position, for transformers' own masks."""
        return _announced(self.window).used, 0

    def get_seq_length(self) -> int:
        """Return where the window starts, 0 where every row starts elsewhere."""
        return _announced(self.window).start or 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.size


class RecurrentStore(LinearAttentionLayer):
    """State of one recurrent layer with a convolution, able to go back inside the last window.

    ``conv_BCW`` holds the convolution's last inputs, ``state_BHKV`` the recurrent state, of all rows.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        # transformers then hands over the convolution's inputs also for a single token.
        self.activate_past_recording()
        self.num_rows = num_rows
        self.conv_BCW: Tensor | None = None
        self.state_BHKV: Tensor | None = None
        self.window: Window | None = None
        self._window_conv: Tensor | None = None
        self._window_state: Tensor | Undecided | None = None

    def begin(self, window: Window) -> None:
        """Show the model the states of the window's rows."""
        self.window = window
        earlier = not window.is_fresh
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
        """Take what the kernel returned: the state after the last token, (B, H, Kd, Vd), or the window, undecided."""
        self._window_state = recurrent_states
        return recurrent_states

    def commit(self, num_kept_B: Tensor | None) -> None:
        """Keep the first tokens of the window, all of them for None. A window of one token is always kept."""
        window, conv, state = _announced(self.window), self._window_conv, self._window_state
        if conv is None or state is None:
            raise RuntimeError("recurrent cache: no window ran; expected one forward before every commit.")
        # In place: a captured round knows these buffers by their address.
        if isinstance(state, Tensor):
            if num_kept_B is not None and window.num_tokens > 1:
                raise RuntimeError(
                    f"recurrent cache: a window of {window.num_tokens} tokens, already decided; expected it undecided. "
                    "Run it under undecided_states()."
                )
            conv_BCW, state_BHKV = self._buffers(window, conv, state)
            state_BHKV.copy_(state)
            conv_BCW.copy_(conv[..., window.num_tokens :])
        else:
            conv_BCW, state_BHKV = self._buffers(window, conv, None)
            all_B = torch.full((len(conv),), window.num_tokens, device=conv.device)
            # A row out of use may claim anything.
            num_kept_B = all_B if num_kept_B is None else num_kept_B.clamp(0, window.num_tokens)
            state.commit(num_kept_B, state_BHKV)
            taken_BW = num_kept_B[:, None] + torch.arange(conv_BCW.shape[-1], device=conv.device)
            conv_BCW.copy_(conv.gather(2, taken_BW[:, None].expand(-1, conv.shape[1], -1)))
        self._window_conv = self._window_state = None

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """Return a copy of the states."""
        if self.conv_BCW is None or self.state_BHKV is None:
            raise RuntimeError("recurrent cache: no state yet; expected a window before the snapshot.")
        return self.conv_BCW.clone(), self.state_BHKV.clone()

    def restore(self, states: tuple[Tensor, Tensor]) -> None:
        """Go back to a snapshot."""
        for ours, saved in zip((self.conv_BCW, self.state_BHKV), states, strict=True):
            if ours is not None:
                ours.copy_(saved)

    def _buffers(self, window: Window, conv: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the window's rows of both buffers, allocated when the first state comes."""
        if self.conv_BCW is None or self.state_BHKV is None:
            if state is None:
                raise RuntimeError("recurrent cache: undecided without a state before it; expected prefill first.")
            width = conv.shape[-1] - window.num_tokens
            self.conv_BCW = conv.new_zeros(self.num_rows, conv.shape[1], width)
            self.state_BHKV = state.new_zeros(self.num_rows, *state.shape[1:])
        return self.conv_BCW[window.rows], self.state_BHKV[window.rows]


class WindowCache(Cache):
    """Buffers for a batch of rows, run a window at a time.

    Args:
        config: The text config of the model that will use it.
        num_rows: B.
        capacity: Positions that a row may reach.
        max_window: Longest window that will run; buffers of sliding layers need the room.

    Raises:
        UnsupportedModelError: A layer keeps state of a kind that cannot be rolled back here.
    """

    def __init__(self, config: PretrainedConfig, *, num_rows: int, capacity: int, max_window: int) -> None:
        stock = DynamicCache(config=config).layers
        super().__init__(layers=[_store(layer, i, num_rows, capacity, max_window) for i, layer in enumerate(stock)])
        self.num_rows = num_rows
        self.capacity = capacity
        self.max_window = max_window

    @property
    def recurrent(self) -> list[RecurrentStore]:
        """The recurrent layers."""
        return [layer for layer in self.layers if isinstance(layer, RecurrentStore)]

    def begin(self, window: Window) -> dict[str, Tensor | None]:
        """Announce the next window; return its masks by layer type (None where plain causal attention says the same).

        Raises:
            RuntimeError: The window is longer than the buffers were made for, or goes past them.
        """
        if window.num_tokens > self.max_window or window.used > self.capacity:
            raise RuntimeError(
                f"cache: a window of {window.num_tokens} tokens up to position {window.used}; expected at most "
                f"{self.max_window} tokens and {self.capacity} positions. Make the cache larger."
            )
        masks: dict[str, Tensor | None] = {}
        for layer in self.layers:
            if isinstance(layer, RecurrentStore):
                layer.begin(window)
                masks["linear_attention"] = None
            elif isinstance(layer, AttentionStore):
                layer.window = window
                kind = "full_attention" if layer.sliding_window is None else "sliding_attention"
                if kind not in masks:
                    masks[kind] = window.mask(layer.size, layer.sliding_window)
        return masks

    def commit(self, num_kept_B: Tensor | None) -> None:
        """Keep the first ``num_kept_B`` tokens of each row's window, all of them for None."""
        for layer in self.recurrent:
            layer.commit(num_kept_B)

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Return a copy of what a later window would change for good: the recurrent layers' states."""
        return [layer.snapshot() for layer in self.recurrent]

    def restore(self, states: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Go back to a snapshot."""
        for layer, saved in zip(self.recurrent, states, strict=True):
            layer.restore(saved)


def _announced(window: Window | None) -> Window:
    if window is None:
        raise RuntimeError("cache: no window announced; expected begin() before every forward.")
    return window


def _store(layer: Any, index: int, num_rows: int, capacity: int, max_window: int) -> AttentionStore | RecurrentStore:
    if type(layer) is DynamicLayer:
        return AttentionStore(num_rows, capacity, None)
    if type(layer) is DynamicSlidingWindowLayer:
        # One window more than is seen: writing it must not take away what its first token still sees.
        return AttentionStore(num_rows, min(capacity, layer.sliding_window + max_window), layer.sliding_window)
    if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
        return RecurrentStore(num_rows)
    raise UnsupportedModelError(
        f"trunk layer {index}: keeps its state in a {type(layer).__name__}, which cannot undo a rejected draft; "
        "expected full or sliding attention, or a recurrent layer with one state. Decode this model elsewhere."
    )
