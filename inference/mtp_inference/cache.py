"""The cache of a batch: fixed buffers, a window at a time, with the rollback that speculative decoding needs.

Every forward is a window (see ``window.py``): announce it with :meth:`WindowCache.begin`, run the model, then
:meth:`WindowCache.commit` how many tokens of it each row keeps. Attention layers have nothing to do then: the next
window writes over what was rejected. Recurrent layers go back in ``recurrent_cache.py``. Rows are independent: they may
stand at different positions and keep different numbers of tokens.

Shapes: B rows, T tokens of the window, S slots, H heads, X width, G groups, N positions of a group, E entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from mtp_inference.convolved import ConvolutionInputs
from mtp_inference.ngrams import NGRAM_STATES, NgramStore
from mtp_inference.pooled import KeyPools
from mtp_inference.recurrent_cache import RecurrentLayers, RecurrentStore, States
from mtp_inference.window import Window, announced
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.compressed_keys import COMPRESSED_CACHE_LAYERS
from mtp_train.families.key_blocks import BLOCK_CACHE_LAYER
from mtp_train.families.relative import CONVOLVED_CACHE_LAYERS
from mtp_train.heads.step import KeysWritten

_STATELESS = "DummyLayer"
"""By name: transformers before 5.18 has no such class."""
BEFORE_ANY_TEXT = -(1 << 40)
"""A position before all others."""


class AttentionStore(CacheLayerMixin):
    """Keys and values of one attention layer, (B, H, S, width), allocated when the first ones come.

    Args:
        num_rows: B.
        size: S.
        sliding_window: How many positions a token sees; None for all.
        dtype: Of the buffers; None for that of the first keys. Others are converted, both ways.
    """

    last_to_write = True
    """Whether nothing of a layer is written after its keys and values."""
    needs_mask = False
    """Whether the layer wants a mask also where plain causal attention says the same."""
    keys_suffice = True
    """Whether later tokens need nothing of a token but its keys and values (of an indexer too)."""

    def __init__(self, num_rows: int, size: int, sliding_window: int | None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.size = size
        self.sliding_window = sliding_window
        self.buffer_dtype = dtype
        self.kind = "full_attention" if sliding_window is None else "sliding_attention"
        self.window: Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers."""
        heads = (self.num_rows, key_states.shape[1], self.size)
        dtype = self.buffer_dtype or key_states.dtype
        self.keys = key_states.new_zeros(*heads, key_states.shape[-1], dtype=dtype)
        self.values = value_states.new_zeros(*heads, value_states.shape[-1], dtype=dtype)
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
            buffer[window.row_index_B1, :, slots_BT] = new.transpose(1, 2).to(buffer.dtype)
        if window.keys_only and self.last_to_write:
            raise KeysWritten
        used = min(window.used, self.size)
        keys, values = self.keys[window.rows, :, :used], self.values[window.rows, :, :used]
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def mask(self, window: Window, always: bool) -> Tensor | None:
        """Return what the layer is told of who sees whom; ``always``, or None where plain causal attention says it."""
        return window.mask(self.size, self.sliding_window, always)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys in use and the first one's position, for transformers' own masks."""
        return announced(self.window).used, 0

    def get_seq_length(self) -> int:
        """Return where the window starts, 0 where every row starts elsewhere."""
        return announced(self.window).start or 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.size


class IndexedStore(AttentionStore, KeyPools):
    """An attention layer whose indexer chooses the keys to see (sparse attention); it has keys of its own, or pools.

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

    def update(
        self, key_states: Tensor, value_states: Tensor, *_unused: object, **_also_unused: object
    ) -> tuple[Tensor, Tensor]:
        """See :class:`AttentionStore`."""
        found = super().update(key_states, value_states)
        self.keys_of = announced(self.window)
        if self.keys_of.keys_only and self.pools_of is self.keys_of:
            raise KeysWritten
        return found

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


class CompressedStore(AttentionStore):
    """A layer that sees compressed keys beside a sliding window (``mtp_train.families.compressed_keys``).

    Inputs and entries have slots by position, as keys have, under the name of the compressor that they belong to.

    Args:
        num_rows: B.
        capacity: Positions that a row may reach.
        max_window: Longest window that will run.
        sliding_window: How many positions a token sees.
        group_size: N.
    """

    last_to_write = False
    needs_mask = True

    def __init__(self, num_rows: int, capacity: int, max_window: int, sliding_window: int, group_size: int) -> None:
        super().__init__(num_rows, min(capacity, sliding_window + max_window), sliding_window)
        self.group_size = group_size
        # A window begins inside of a group, and the group before is read too.
        self.num_inputs = max_window + 2 * group_size
        # A window may begin one more that no row will fill.
        self.num_entries = capacity // group_size + 2
        self.inputs_BSX: dict[str, Tensor] = {}
        self.entries_BEX: dict[str, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffer; keys are values too."""
        super().lazy_initialization(key_states, value_states)
        self.values = self.keys

    def groups(self, name: str, inputs_BTX: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`EntryStore`."""
        window = announced(self.window)
        if name not in self.inputs_BSX:
            self.inputs_BSX[name] = inputs_BTX.new_zeros(self.num_rows, self.num_inputs, inputs_BTX.shape[-1])
        buffer_BSX = self.inputs_BSX[name]
        buffer_BSX[window.row_index_B1, window.slots_BT(self.num_inputs)] = inputs_BTX
        device = inputs_BTX.device
        # So many groups a window of this length can fill at most, wherever it begins.
        places_G = torch.arange(-1, -(-window.num_tokens // self.group_size), device=device)
        groups_BG = window.positions_BT[:, :1] // self.group_size + places_G
        positions_BGN = groups_BG[..., None] * self.group_size + torch.arange(self.group_size, device=device)
        return groups_BG, buffer_BSX[window.row_index_B1[..., None], positions_BGN % self.num_inputs]

    def write_entries(self, name: str, groups_BG: Tensor, entries_BGX: Tensor) -> Tensor:
        """See :class:`EntryStore`."""
        window = announced(self.window)
        if name not in self.entries_BEX:
            self.entries_BEX[name] = entries_BGX.new_zeros(self.num_rows, self.num_entries, entries_BGX.shape[-1])
        buffer_BEX = self.entries_BEX[name]
        buffer_BEX[window.row_index_B1, groups_BG % self.num_entries] = entries_BGX
        return buffer_BEX[window.rows, : window.used // self.group_size]


class ConvolvedStore(AttentionStore, ConvolutionInputs):
    """An attention layer that sees how far away keys are, with short convolutions beside.

    Args:
        num_rows: B.
        size: S.
        sliding_window: How many positions a token sees; None for all.
        max_undecided: Longest window of which less than all may be kept.
        num_convolutions: How many the layer has.
    """

    last_to_write = False
    keys_suffice = False

    def __init__(
        self, num_rows: int, size: int, sliding_window: int | None, max_undecided: int, num_convolutions: int
    ) -> None:
        ConvolutionInputs.__init__(self, num_rows, max_undecided, num_convolutions)
        AttentionStore.__init__(self, num_rows, size, sliding_window)

    def mask(self, window: Window, always: bool) -> Tensor:
        """Return how far away each key is, always."""
        return window.distances(self.size, self.sliding_window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Show no keys: the mask says where they are."""
        return 0, 0

    def get_seq_length(self) -> int:
        """Return a place where transformers scales no scores: ours are scaled by the mask."""
        return BEFORE_ANY_TEXT


class WindowCache(Cache):
    """Buffers for a batch of rows, run a window at a time.

    Args:
        config: The text config of the model that will use it.
        num_rows: B.
        capacity: Positions that a row may reach.
        max_window: Longest window that will run; buffers of sliding layers need the room.
        max_undecided: Longest window of which less than all may be kept; None for ``max_window``.
        dtype: Of keys, values and convolution inputs, where windows come in another one (:attr:`converts`); None for
            that of the first window.

    Raises:
        UnsupportedModelError: A layer keeps state of a kind that cannot be rolled back here.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_rows: int,
        capacity: int,
        max_window: int,
        max_undecided: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        stock = DynamicCache(config=config).layers
        room = _Room(num_rows, capacity, max_window, max_undecided or max_window, dtype)
        super().__init__(layers=[_store(layer, i, room) for i, layer in enumerate(stock)])
        self.num_rows = num_rows
        self.capacity = capacity
        self.max_window = max_window
        # Layers of one kind share a mask.
        attention = [one for one in self.layers if isinstance(one, AttentionStore)]
        self._kinds_with_mask = {one.kind for one in attention if one.needs_mask}
        recurrent = [one for one in self.layers if isinstance(one, RecurrentStore)]
        self._recurrent = RecurrentLayers(recurrent, num_rows, dtype)
        stateless = [one for one in self.layers if type(one).__name__ == _STATELESS]
        self.converts = all(type(one) in (AttentionStore, RecurrentStore) or one in stateless for one in self.layers)
        """Whether windows may come in another dtype than the one that is kept."""

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
        no_padding = any(isinstance(layer, RecurrentStore | ConvolvedStore) for layer in self.layers)
        masks: dict[str, Tensor | None] = {"linear_attention": None} if no_padding else {}
        self._recurrent.begin(window)
        for layer in self.layers:
            if isinstance(layer, AttentionStore):
                layer.window = window
                if layer.kind not in masks:
                    masks[layer.kind] = layer.mask(window, layer.kind in self._kinds_with_mask)
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


class _Room(NamedTuple):
    """What the layers of a cache make room for; see :class:`WindowCache`."""

    num_rows: int
    capacity: int
    max_window: int
    max_undecided: int
    dtype: torch.dtype | None


def _store(layer: Any, index: int, room: _Room) -> Any:
    num_rows, capacity, max_window, max_undecided, dtype = room
    if type(layer).__name__ in CONVOLVED_CACHE_LAYERS and layer.number_of_states > 1:
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        size = capacity if window is None else min(capacity, window + max_window)
        return ConvolvedStore(num_rows, size, window, max_undecided, layer.number_of_states)
    if type(layer) is DynamicLayer:
        return AttentionStore(num_rows, capacity, None, dtype)
    if type(layer) is DynamicIndexedLayer:
        return IndexedStore(num_rows, capacity)
    if type(layer).__name__ == BLOCK_CACHE_LAYER:
        return BlockStore(num_rows, capacity)
    if type(layer).__name__ in COMPRESSED_CACHE_LAYERS:
        return CompressedStore(num_rows, capacity, max_window, layer.sliding_window, layer.compress_rate)
    if type(layer).__name__ == _STATELESS:
        return layer
    if type(layer) is DynamicSlidingWindowLayer:
        # One window more than is seen: writing it must not take away what its first token still sees.
        size = min(capacity, layer.sliding_window + max_window)
        return AttentionStore(num_rows, size, layer.sliding_window, dtype)
    if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
        return RecurrentStore()
    if type(layer) is LinearAttentionLayer and layer.number_of_states == NGRAM_STATES:
        return NgramStore(num_rows, max_undecided)
    raise UnsupportedModelError(
        f"trunk layer {index}: keeps its state in a {type(layer).__name__}, which cannot undo a rejected draft; "
        "expected full or sliding attention, or a recurrent layer with one state. Decode this model elsewhere."
    )
