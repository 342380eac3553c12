"""The cache of a batch: fixed buffers, a window at a time, with the rollback that speculative decoding needs.

Every forward is a window (see ``window.py``): announce it with :meth:`WindowCache.begin`, run the model, then
:meth:`WindowCache.commit` how many tokens of it each row keeps. Attention layers have nothing to do then: the next
window writes over what was rejected. Recurrent layers go back in ``recurrent_cache.py``. Rows are independent: they may
stand at different positions and keep different numbers of tokens.

Shapes: B rows, T tokens of the window, S slots, H heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from mtp_inference.recurrent_cache import RecurrentLayers, RecurrentStore, States
from mtp_inference.window import Window, announced
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.key_blocks import BLOCK_CACHE_LAYER
from mtp_train.heads.step import KeysWritten


class AttentionStore(CacheLayerMixin):
    """Keys and values of one attention layer, (B, H, S, width), allocated when the first ones come.

    Args:
        num_rows: B.
        size: S.
        sliding_window: How many positions a token sees; None for all.
    """

    last_to_write = True
    """Whether nothing of a layer is written after its keys and values."""
    needs_mask = False
    """Whether the layer wants a mask also where plain causal attention says the same."""

    def __init__(self, num_rows: int, size: int, sliding_window: int | None) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.size = size
        self.sliding_window = sliding_window
        self.kind = "full_attention" if sliding_window is None else "sliding_attention"
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
        window = announced(self.window)
        slots_BT = window.slots_BT(self.size)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[window.row_index_B1, :, slots_BT] = new.transpose(1, 2)
        if window.keys_only and self.last_to_write:
            raise KeysWritten
        used = min(window.used, self.size)
        return self.keys[window.rows, :, :used], self.values[window.rows, :, :used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys in use and the first one's position, for transformers' own masks."""
        return announced(self.window).used, 0

    def get_seq_length(self) -> int:
        """Return where the window starts, 0 where every row starts elsewhere."""
        return announced(self.window).start or 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.size


class IndexedStore(AttentionStore):
    """An attention layer whose indexer chooses the keys to see (sparse attention); it has keys of its own.

    Args:
        num_rows: B.
        size: S.
    """

    last_to_write = False
    needs_mask = True

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__(num_rows, size, None)
        self.kind = "indexed_attention"
        self.indexer_keys_BSX: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the window's indexer keys (B, T, width); return those in use, (B, used, width)."""
        if self.indexer_keys_BSX is None:
            width = indexer_key_states.shape[-1]
            self.indexer_keys_BSX = indexer_key_states.new_zeros(self.num_rows, self.size, width)
        window = announced(self.window)
        self.indexer_keys_BSX[window.row_index_B1, window.slots_BT(self.size)] = indexer_key_states
        if window.keys_only:
            raise KeysWritten
        return self.indexer_keys_BSX[window.rows, : min(window.used, self.size)]


class BlockStore(IndexedStore):
    """An attention layer whose indexer chooses blocks of keys: by slot in a trunk, by position in a head.

    Args:
        num_rows: B.
        size: S.
    """

    needs_mask = False

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__(num_rows, size)
        self.kind = "full_attention"
        self.positions_BS: Tensor | None = None

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Write the window's indexer keys (B, 1, T, width); return those in use, (B, 1, used, width)."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    def update_positions(self, positions_BT: Tensor) -> Tensor:
        """Write the positions of the window's keys; return those in use, (B, used)."""
        if self.positions_BS is None:
            self.positions_BS = positions_BT.new_zeros(self.num_rows, self.size)
        window = announced(self.window)
        self.positions_BS[window.row_index_B1, window.slots_BT(self.size)] = positions_BT
        return self.positions_BS[window.rows, : min(window.used, self.size)]


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
        self._recurrent = RecurrentLayers([one for one in self.layers if isinstance(one, RecurrentStore)], num_rows)

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
        masks: dict[str, Tensor | None] = {"linear_attention": None} if self._recurrent.stores else {}
        self._recurrent.begin(window)
        for layer in self.layers:
            if isinstance(layer, AttentionStore):
                layer.window = window
                if layer.kind not in masks:
                    masks[layer.kind] = window.mask(layer.size, layer.sliding_window, layer.needs_mask)
        return masks

    def commit(self, num_kept_B: Tensor | None) -> None:
        """Keep the first ``num_kept_B`` tokens of each row's window, all of them for None."""
        self._recurrent.commit(num_kept_B)

    def snapshot(self) -> States | None:
        """Return a copy of what a later window would change for good: the recurrent layers' states."""
        return self._recurrent.snapshot()

    def restore(self, states: States | None) -> None:
        """Go back to a snapshot."""
        self._recurrent.restore(states)


def _store(layer: Any, index: int, num_rows: int, capacity: int, max_window: int) -> Any:
    if type(layer) is DynamicLayer:
        return AttentionStore(num_rows, capacity, None)
    if type(layer) is DynamicIndexedLayer:
        return IndexedStore(num_rows, capacity)
    if type(layer).__name__ == BLOCK_CACHE_LAYER:
        return BlockStore(num_rows, capacity)
    if type(layer).__name__ == "DummyLayer":
        # By name: transformers before 5.18 has no such class.
        return layer
    if type(layer) is DynamicSlidingWindowLayer:
        # One window more than is seen: writing it must not take away what its first token still sees.
        return AttentionStore(num_rows, min(capacity, layer.sliding_window + max_window), layer.sliding_window)
    if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
        return RecurrentStore()
    raise UnsupportedModelError(
        f"trunk layer {index}: keeps its state in a {type(layer).__name__}, which cannot undo a rejected draft; "
        "expected full or sliding attention, or a recurrent layer with one state. Decode this model elsewhere."
    )
