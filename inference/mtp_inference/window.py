"""One window: the tokens that a forward runs over, each row at a place of its own, and who sees what.

A row's token at position p has its keys in slot ``p % size`` of a layer's buffer. Slots are never moved: what a
rejected draft left behind lies at positions that no later token sees until it is written over. A buffer holds every
position up to its size, or, in a layer with a sliding window, the positions of that window and of one forward more.

Shapes: B rows, T tokens of the window, S slots, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import sdpa_mask

from mtp_train.heads.attention import masked_attention
from mtp_train.heads.sdpa import without_cudnn_attention

WINDOW_ATTENTION = "mtp_window"
MAX_PACKED_QUERIES = 64
"""Most queries of one key head that are attended to in one packed call; beyond it the stock path repeats the keys."""


@dataclass(frozen=True)
class Window:
    """Where the tokens of one forward go.

    Args:
        rows: The batch rows that take part; the window's row i is row ``rows.start + i`` of the buffers.
        positions_BT: int64, consecutive in each row.
        used: Positions in use after the window, an upper bound known on the host.
        start: The first position, where it is the same for all rows and known on the host, else None.
        keys_only: Whether to stop once keys and values are written.
    """

    rows: slice
    positions_BT: Tensor
    used: int
    start: int | None = None
    keys_only: bool = False
    _slots: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def row_index_B1(self) -> Tensor:
        """The buffers' row of every window row."""
        device = self.positions_BT.device
        return torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]

    def slots_BT(self, size: int) -> Tensor:
        """Return where a buffer of so many slots keeps each token; layers of one size share the answer."""
        if size not in self._slots:
            self._slots[size] = self.positions_BT % size
        return self._slots[size]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.positions_BT.shape[1]

    @property
    def is_fresh(self) -> bool:
        """Whether nothing comes before the window."""
        return self.start == 0

    def mask(self, size: int, sliding_window: int | None, always: bool = False) -> Tensor | None:
        """Return which slots each token sees: bool (B or 1, 1, T, S).

        None where plain causal attention says the same, and where nothing attends.

        Args:
            size: Slots of the layer's buffer; S is the part of it in use.
            sliding_window: How many positions a token sees, itself included; None for all.
            always: Whether the layer wants a mask in any case, and one for each row.
        """
        if self.keys_only and not always:
            return None
        fits = sliding_window is None or self.used <= sliding_window
        exact = self.start is not None and self.used == self.start + self.num_tokens
        if fits and exact and (self.is_fresh or self.num_tokens == 1) and not always:
            return None
        seen_by_B1T1, held_B11S = self._places(size, sliding_window, each_row=always)
        if sliding_window is None:
            return held_B11S <= seen_by_B1T1
        return (held_B11S >= 0) & (held_B11S <= seen_by_B1T1) & (held_B11S > seen_by_B1T1 - sliding_window)

    def distances(self, size: int, sliding_window: int | None) -> Tensor:
        """Return how far before each token the slots' positions are: int64 (B or 1, 1, T, S), -1 where it sees none.

        Arguments as of :meth:`mask`.
        """
        seen_by_B1T1, held_B11S = self._places(size, sliding_window)
        distance_B1TS = seen_by_B1T1 - held_B11S
        seen_B1TS = (held_B11S >= 0) & (distance_B1TS >= 0)
        if sliding_window is not None:
            seen_B1TS &= distance_B1TS < sliding_window
        return torch.where(seen_B1TS, distance_B1TS, -1)

    def _places(self, size: int, sliding_window: int | None, each_row: bool = False) -> tuple[Tensor, Tensor]:
        """Return the tokens' positions, (B or 1, 1, T, 1), and those that slots hold, to broadcast with them."""
        slots_S = torch.arange(min(self.used, size), device=self.positions_BT.device)
        # Rows that stand at the same place share a mask.
        positions_BT = self.positions_BT if self.start is None or each_row else self.positions_BT[:1]
        seen_by_B1T1 = positions_BT[:, None, :, None]
        if sliding_window is None:
            return seen_by_B1T1, slots_S[None, None, None]
        # The newest position that a slot can hold once this window is written. What a deeper window left beyond it is
        # thereby taken for a position one turn earlier, which lies outside the sliding window.
        newest_B111 = positions_BT[:, -1][:, None, None, None]
        return seen_by_B1T1, newest_B111 - (newest_B111 - slots_S) % size


def window_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from a few tokens to many keys, without repeating the keys for grouped queries.

    The queries that share a key head are laid one after the other, as if they were more tokens. Takes the place of
    transformers' ``sdpa`` (hence the arguments); prefill and more than plain attention go to ``masked_attention``.
    """
    num_rows, num_heads, num_tokens, width = query.shape
    key_heads = key.shape[1]
    group = num_heads // key_heads
    plain = all(options.get(name) is None for name in ("s_aux", "softcap", "indices", "block_indices", "position_bias"))
    if attention_mask is None or group * num_tokens > MAX_PACKED_QUERIES or group == 1 or not plain:
        return masked_attention(module, query, key, value, attention_mask, **options)
    packed = query.reshape(num_rows, key_heads, group * num_tokens, width)
    mask = attention_mask.expand(-1, group, -1, -1).reshape(attention_mask.shape[0], 1, group * num_tokens, -1)
    output = torch.nn.functional.scaled_dot_product_attention(packed, key, value, mask, scale=options["scaling"])
    output = output.reshape(num_rows, num_heads, num_tokens, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def announced(window: Window | None) -> Window:
    """Return the window of a cache that was told of one.

    Raises:
        RuntimeError: It was not.
    """
    if window is None:
        raise RuntimeError("cache: no window announced; expected begin() before every forward.")
    return window


AttentionInterface.register(WINDOW_ATTENTION, window_attention)
AttentionMaskInterface.register(WINDOW_ATTENTION, sdpa_mask)


@contextmanager
def attending_in_windows(*configs: PretrainedConfig) -> Iterator[None]:
    """Make the models of these configs use :func:`window_attention` meanwhile.

    transformers' plain loop over experts, which heads have, waits for the device: grouped products take its place.
    """
    stock = [(config._attn_implementation, config._experts_implementation) for config in configs]
    for config in configs:
        config._attn_implementation = WINDOW_ATTENTION
        if config._experts_implementation == "eager":
            config._experts_implementation = "grouped_mm"
    try:
        with without_cudnn_attention():
            yield
    finally:
        for config, (attention, experts) in zip(configs, stock, strict=True):
            config._attn_implementation = attention
            config._experts_implementation = experts
