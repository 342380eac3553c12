"""The cache of a batch: fixed buffers that are written a window at a time and can be rolled back within it.

Every forward is a window (see ``cache/window.py``): announce it with :meth:`WindowCache.begin`, run the model, then
call :meth:`WindowCache.commit` with the number of tokens that each row keeps. :func:`prefill_chunks` and
:func:`window_states` do so. Attention layers need no rollback: the
next window overwrites rejected tokens. Recurrent layers are rolled back in ``cache/recurrent.py``. Rows are
independent: they may be at different positions and keep different numbers of tokens.

Shapes: B rows, R rows that are prefilled together, T tokens of the window, D hidden, S slots, H heads, X width, G
groups, N positions of a group or keys of a pool, P pools, E entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, PretrainedConfig

from mtp_inference.cache.recurrent import (
    NGRAM_STATES,
    ConvolutionInputs,
    NgramStore,
    RecurrentLayers,
    RecurrentStore,
    undecided_states,
)
from mtp_inference.cache.rows import PlacedState, RowState, select_rows
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.mechanisms.compressed_keys import COMPRESSED_CACHE_LAYERS
from mtp_train.families.mechanisms.key_blocks import BLOCK_CACHE_LAYER
from mtp_train.families.mechanisms.key_pools import Pools
from mtp_train.families.mechanisms.relative_positions import CONVOLVED_CACHE_LAYERS
from mtp_train.heads.step import KeysWritten
from mtp_train.trunk.load import Trunk
from mtp_train.upstream.transformers_private import DynamicIndexedLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

_STATELESS = "DummyLayer"
"""transformers' cache class for layers without state, such as an MLP alone, by name: 5.17 and older lack it."""
BEFORE_ANY_TEXT = -(1 << 40)
"""A position lower than any real one."""
PREFILL_CHUNK = 2048
"""Prompt tokens per forward."""


class AttentionStore(CacheLayerMixin, PlacedState):
    """Keys and values of one attention layer, (B, H, S, width), allocated at the first update.

    Args:
        sliding_window: Number of positions that a query attends to; None for all.
        dtype: Dtype of the buffers; None for the dtype of the first keys. Keys and values of another dtype are
            converted when written, and back when read.
    """

    last_to_write = True
    """Whether the layer writes nothing after keys and values, so that :meth:`update` may end a keys-only window
    (:attr:`Window.keys_only`) by raising ``KeysWritten``. Subclasses that write more raise it later, or never: pools
    are written before the keys or after them."""
    needs_mask = False
    """Whether the layer's forward reads the mask itself (for an indexer's scores, or compressed keys), so that it needs
    one even if plain causal attention is equivalent."""
    keys_suffice = True
    """Whether later tokens read nothing of a token but its keys and values (an indexer's included). If so, the drafter
    runs tokens that no draft starts from as keys-only windows; else it runs the whole layer for them."""

    def __init__(
        self, num_rows: int, size: int, sliding_window: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        CacheLayerMixin.__init__(self)
        PlacedState.__init__(self, num_rows)
        self.size = size
        self.sliding_window = sliding_window
        self.buffer_dtype = dtype

    @property
    def kind(self) -> str:
        """The layer type, by which layers share a mask."""
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads = (self.num_rows, key_states.shape[1], self.size)
        dtype = self.buffer_dtype or key_states.dtype
        self.keys = key_states.new_zeros(*heads, key_states.shape[-1], dtype=dtype)
        self.values = value_states.new_zeros(*heads, value_states.shape[-1], dtype=dtype)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_unused: object, **_also_unused: object
    ) -> tuple[Tensor, Tensor]:
        """Write the window's keys and values; return the keys and values in use, (B, H, used, width)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        shared = window.shared_slots(self.size)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if shared is not None:
                buffer[window.rows, :, shared] = new
            else:
                slots_BT = window.slots_BT(self.size)
                buffer[window.row_index_B1, :, slots_BT] = new.transpose(1, 2).to(buffer.dtype)
        if window.keys_only and self.last_to_write:
            raise KeysWritten
        keys, values = (buffer[window.rows, :, : window.used] for buffer in (self.keys, self.values))
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    @torch.no_grad()
    def keep_rows(self, rows_R: Tensor) -> None:
        super().keep_rows(rows_R)
        if self.is_initialized:
            is_shared = self.values is self.keys
            self.keys = select_rows(self.keys, rows_R)
            self.values = self.keys if is_shared else select_rows(self.values, rows_R)

    def mask(self, window: Window, always: bool) -> Tensor | None:
        """Return the layer's attention mask; None if plain causal attention is equivalent and ``always`` is False."""
        return window.mask(self.size, self.sliding_window, always)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys in use and the position of the first key, for transformers' own masks."""
        return self.window.used, 0

    def get_seq_length(self) -> int:
        """Return the start of the window; 0 if rows start at different positions."""
        return self.window.start or 0

    def get_max_length(self) -> int:
        return self.size


class IndexedStore(AttentionStore):
    """Cache of a sparse attention layer: its keys and values, and the indexer's keys, by which it chooses among them.

    The indexer stores one key per token (:meth:`update_indexer`), or one per pool of N tokens, by the methods of
    ``UnrolledPools`` (``mtp_train.families.mechanisms.key_pools``) and with a slot for every position.
    """

    kind = "indexed_attention"
    last_to_write = False
    needs_mask = True

    @property
    def indexer_position_ids(self) -> None:
        """Always None: transformers would store all positions for its indexers here, ours do not need them."""
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Discard the positions."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the window's indexer keys (B, T, X); return the indexer keys in use, (B, used, X)."""
        found_BSX = self._placed_in_use("indexer keys", indexer_key_states)
        if self.window.keys_only:
            raise KeysWritten
        return found_BSX

    def ending_with(self, inputs_BTX: Tensor, size: int) -> tuple[Tensor, Tensor]:
        window = self.window
        slots_BT = self.window.slots_BT(self.size)
        inputs_BSX = self.place("inputs", inputs_BTX, slots_BT, self.size)
        back_N = torch.arange(size - 1, -1, -1, device=inputs_BTX.device)
        slots_BTN = (slots_BT[..., None] - back_N).clamp(min=0)
        return inputs_BSX[window.row_index_B1[..., None], slots_BTN], slots_BTN

    def write_pools(self, new: Pools, number_BT: Tensor) -> Pools:
        window = self.window
        num_keys = new.slots_BPN.shape[-1]
        num_pools = self.size // num_keys
        # The last place takes tokens that complete no pool.
        places_BT = torch.where(number_BT < 0, num_pools, number_BT)
        keys_BPX = self.place("pool keys", new.keys_BPX, places_BT, num_pools + 1)
        slots_BPN = self.place("pool slots", new.slots_BPN, places_BT, num_pools + 1, fill=-1)
        used = min(window.used // num_keys, num_pools)
        return Pools(keys_BPX[window.rows, :used], slots_BPN[window.rows, :used])

    def _placed_in_use(self, name: str, new_BTX: Tensor) -> Tensor:
        """Write an entry for each token of the window, in the slot of its keys; return the entries in use."""
        window = self.window
        buffer_BSX = self.place(name, new_BTX, window.slots_BT(self.size), self.size)
        return buffer_BSX[window.rows, : window.used]


class BlockStore(IndexedStore):
    """Cache of an attention layer whose indexer chooses blocks of keys.

    A trunk's indexer, transformers' own, counts blocks by slot. A head's indexer
    (``mtp_train.families.mechanisms.key_blocks``) counts them by position, and stores positions by
    :meth:`update_positions`.
    """

    kind = "full_attention"
    needs_mask = False

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Write the window's indexer keys (B, 1, T, width); return the indexer keys in use, (B, 1, used, width)."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    def update_positions(self, positions_BT: Tensor) -> Tensor:
        """Write the positions of the window's keys; return the positions in use, (B, used)."""
        return self._placed_in_use("positions", positions_BT)


class CompressedStore(AttentionStore):
    """Cache of a layer that attends to compressed keys and a sliding window.

    See ``mtp_train.families.mechanisms.compressed_keys``. Inputs and entries are stored by the name of their
    compressor, in slots by position like keys. N is ``group_size``.
    """

    last_to_write = False
    needs_mask = True

    def __init__(self, num_rows: int, capacity: int, max_window: int, sliding_window: int, group_size: int) -> None:
        super().__init__(num_rows, min(capacity, sliding_window + max_window), sliding_window)
        self.group_size = group_size
        # A window may begin inside a group, and the previous group is read too.
        self.num_inputs = max_window + 2 * group_size
        # Numbers of entries reach capacity // group_size: the last group may be begun and not completed. One spare.
        self.num_entries = capacity // group_size + 2

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate one buffer: keys are the values too."""
        super().lazy_initialization(key_states, value_states)
        self.values = self.keys

    def groups(self, name: str, inputs_BTX: Tensor) -> tuple[Tensor, Tensor]:
        """Write the window's inputs; return the groups that it may complete, preceded by the group before them.

        Returns:
            Group numbers, int (B, G + 1), consecutive, -1 if there is no group before; their inputs, (B, G + 1, N, X).
        """
        window = self.window
        buffer_BSX = self.place(f"{name} inputs", inputs_BTX, window.slots_BT(self.num_inputs), self.num_inputs)
        device = inputs_BTX.device
        # The group before the window's first one, then as many as a window of this length can complete, wherever it
        # begins. Group -1, before position 0, gets meaningless inputs, which the compressor ignores.
        places_G = torch.arange(-1, -(-window.num_tokens // self.group_size), device=device)
        groups_BG = window.positions_BT[:, :1] // self.group_size + places_G
        positions_BGN = groups_BG[..., None] * self.group_size + torch.arange(self.group_size, device=device)
        return groups_BG, buffer_BSX[window.row_index_B1[..., None], positions_BGN % self.num_inputs]

    def write_entries(self, name: str, groups_BG: Tensor, entries_BGX: Tensor) -> Tensor:
        """Write the entries of groups; return all entries in use, (B, E, X), incomplete groups included."""
        window = self.window
        buffer_BEX = self.place(f"{name} entries", entries_BGX, groups_BG % self.num_entries, self.num_entries)
        return buffer_BEX[window.rows, : window.used // self.group_size]


class ConvolvedStore(AttentionStore, ConvolutionInputs):
    """Cache of an attention layer with relative positions and short convolutions."""

    last_to_write = False
    keys_suffice = False

    def __init__(
        self, num_rows: int, size: int, sliding_window: int | None, max_undecided: int, num_convolutions: int
    ) -> None:
        ConvolutionInputs.__init__(self, num_rows, max_undecided, num_convolutions)
        AttentionStore.__init__(self, num_rows, size, sliding_window)

    def mask(self, window: Window, always: bool) -> Tensor:
        """Return the distance of each key; see :meth:`Window.distances`."""
        return window.distances(self.size, self.sliding_window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return no keys: transformers then computes no key positions, as the mask contains the distances."""
        return 0, 0

    def get_seq_length(self) -> int:
        """Return a position at which transformers scales no scores: ``RelativeProfiles`` scales them instead."""
        return BEFORE_ANY_TEXT


class WindowCache(RowState, Cache):
    """Cache of a model for a batch of rows, written a window at a time.

    Args:
        max_window: Longest window; buffers of sliding-window layers are larger by it.
        max_undecided: Longest window whose tokens may be rejected.
        dtype: Dtype of the stored keys, values and convolution inputs, if windows are computed in another dtype
            (:attr:`converts`); None for the dtype of the first window.

    Raises:
        UnsupportedModelError: A layer has a kind of state that cannot be rolled back here.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_rows: int,
        capacity: int,
        max_window: int,
        max_undecided: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self.max_window = max_window
        self.max_undecided = max_undecided
        self.dtype = dtype
        stock = DynamicCache(config=config).layers
        super().__init__(layers=[self._layer(layer, index) for index, layer in enumerate(stock)])
        self.attention = [one for one in self.layers if isinstance(one, AttentionStore)]
        """The attention layers among the layers."""
        self._kinds_with_mask = {one.kind for one in self.attention if one.needs_mask}
        recurrent = [one for one in self.layers if isinstance(one, RecurrentStore)]
        self.recurrent = RecurrentLayers(recurrent, num_rows, dtype)
        """The recurrent layers among the layers."""
        converting = (AttentionStore, RecurrentStore)
        self.converts = all(type(one) in converting or type(one).__name__ == _STATELESS for one in self.layers)
        """Whether windows may be computed in another dtype than the stored one."""

    def begin(self, window: Window) -> dict[str, Tensor | None]:
        """Announce the next window; return its masks by layer type (None if plain causal attention is equivalent).

        Raises:
            RuntimeError: The window is longer than ``max_window``, or ends past the capacity.
        """
        if window.num_tokens > self.max_window or window.used > self.capacity:
            raise RuntimeError(
                f"cache: a window of {window.num_tokens} tokens up to position {window.used}; expected at most "
                f"{self.max_window} tokens and {self.capacity} positions. Make the cache larger."
            )
        # Recurrent layers and short convolutions of transformers read their padding from this key; no row has any.
        reads_padding = any(isinstance(layer, RecurrentStore | ConvolvedStore) for layer in self.layers)
        masks: dict[str, Tensor | None] = {"linear_attention": None} if reads_padding else {}
        self.recurrent.begin(window)
        for layer in self.attention:
            layer.window = window
            if layer.kind not in masks:
                masks[layer.kind] = layer.mask(window, layer.kind in self._kinds_with_mask)
        return masks

    def commit(self, num_kept_B: Tensor | None) -> None:
        """Keep the first ``num_kept_B`` tokens of each row's window; None keeps the whole window."""
        self.recurrent.commit(num_kept_B)

    def keep_rows(self, rows_R: Tensor) -> None:
        for layer in self.layers:
            if isinstance(layer, AttentionStore | NgramStore):
                layer.keep_rows(rows_R)
        super().keep_rows(rows_R)

    def _layer(self, layer: Any, index: int) -> Any:
        name = type(layer).__name__
        window = getattr(layer, "sliding_window", None)
        # One more window than the layer attends to: writing a window must not overwrite keys that its first token
        # needs.
        size = self.capacity if window is None else min(self.capacity, window + self.max_window)
        if name in CONVOLVED_CACHE_LAYERS and layer.number_of_states > 1:
            return ConvolvedStore(self.num_rows, size, window, self.max_undecided, layer.number_of_states)
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            return AttentionStore(self.num_rows, size, window, self.dtype)
        if type(layer) is DynamicIndexedLayer:
            return IndexedStore(self.num_rows, self.capacity)
        if name == BLOCK_CACHE_LAYER:
            return BlockStore(self.num_rows, self.capacity)
        if name in COMPRESSED_CACHE_LAYERS:
            return CompressedStore(
                self.num_rows, self.capacity, self.max_window, layer.sliding_window, layer.compress_rate
            )
        if name == _STATELESS:
            return layer
        if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
            return RecurrentStore()
        if type(layer) is LinearAttentionLayer and layer.number_of_states == NGRAM_STATES:
            return NgramStore(self.num_rows, self.max_undecided)
        raise UnsupportedModelError(
            f"trunk layer {index}: keeps its state in a {name}, which cannot undo a rejected draft; "
            "expected full or sliding attention, or a recurrent layer with one state. Decode this model elsewhere."
        )


def prefill_chunks(model: Trunk, cache: WindowCache, rows: slice, prompt_RT: Tensor, chunk: int) -> Iterator[Tensor]:
    """Run prompts of one length from position 0; yield the hidden states of each chunk, (R, T, D)."""
    for start in range(0, prompt_RT.shape[1], chunk):
        tokens_RT = prompt_RT[:, start : start + chunk]
        window = Window.of_prompts(rows, start + tokens_RT.shape[1], prompt_RT.device, start)
        masks = cache.begin(window)
        with attending_in_windows(model.config):
            hidden_RTD = model.window_hidden(tokens_RT, positions_BT=window.positions_BT, masks=masks, cache=cache)
        cache.commit(None)
        yield hidden_RTD


def window_states(model: Trunk, cache: WindowCache, tokens_BT: Tensor, window: Window) -> Tensor:
    """Run a window after earlier ones without committing it; return its hidden states, (B, T, D)."""
    masks = cache.begin(window)
    with attending_in_windows(model.config), undecided_states(model.family):
        return model.window_hidden(tokens_BT, positions_BT=window.positions_BT, masks=masks, cache=cache)
