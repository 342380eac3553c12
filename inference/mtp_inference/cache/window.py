"""A window: the tokens that one forward runs over, at a position of each row, and their attention masks.

The keys of a row's token at position p are in slot ``p % size`` of a layer's buffer. Slots are never moved. The keys of
a rejected draft stay at positions that no later token attends to before they are overwritten. A buffer holds every
position up to its size; in a layer with a sliding window it holds the positions of that window and of one more forward.

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

from mtp_train.heads.attention import masked_attention, without_cudnn_attention
from mtp_train.upstream.transformers_private import attending_by, sdpa_mask

WINDOW_ATTENTION = "mtp_window"
MAX_PACKED_QUERIES = 64
"""Largest number of queries per key head in one packed call. With more, transformers' path repeats the keys."""


@dataclass(frozen=True)
class Window:
    """Rows and positions of the tokens of one forward.

    Args:
        rows: The batch rows that the forward runs over; the window's row i is row ``rows.start + i`` of the buffers.
        positions_BT: int64, consecutive in each row.
        used: Positions in use after the window, an upper bound known on the host.
        start: The first position, if it is the same in all rows and known on the host; else None.
        keys_only: Whether to stop once keys and values are written.
    """

    rows: slice
    positions_BT: Tensor
    used: int
    start: int | None = None
    keys_only: bool = False
    _slots: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_prompts(cls, rows: slice, end: int, device: torch.device, start: int = 0) -> Window:
        """Return the window of the tokens from ``start`` to ``end`` of prompts, one in each of the rows."""
        positions_T = torch.arange(start, end, device=device)
        return cls(rows, positions_T.expand(rows.stop - rows.start, -1), end, start)

    @cached_property
    def row_index_B1(self) -> Tensor:
        """Index of each window row in the buffers."""
        device = self.positions_BT.device
        return torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]

    def slots_BT(self, size: int) -> Tensor:
        """Return the slot of each token in a buffer of ``size`` slots; layers of equal size share the tensor."""
        if size not in self._slots:
            self._slots[size] = self.positions_BT % size
        return self._slots[size]

    def shared_slots(self, size: int) -> slice | None:
        """Return the slots of the window if they are consecutive and the same in all rows, as far as the host knows."""
        if self.start is None:
            return None
        first = self.start % size
        return slice(first, first + self.num_tokens) if first + self.num_tokens <= size else None

    @property
    def num_tokens(self) -> int:
        return self.positions_BT.shape[1]

    @property
    def is_fresh(self) -> bool:
        return self.start == 0

    def mask(self, size: int, sliding_window: int | None, always: bool = False) -> Tensor | None:
        """Return the attention mask over slots: bool (B or 1, 1, T, S), True for a key that a query attends to.

        Return None if plain causal attention is equivalent, or if nothing attends (``keys_only``).

        Args:
            size: Slots of the layer's buffer; S counts the slots in use.
            sliding_window: Number of positions that a query attends to, its own included; None for all.
            always: Whether to return a mask in any case, with a row for each batch row.
        """
        if self.keys_only and not always:
            return None
        fits = sliding_window is None or self.used <= sliding_window
        exact = self.start is not None and self.used == self.start + self.num_tokens
        if fits and exact and (self.is_fresh or self.num_tokens == 1) and not always:
            return None
        seen_by_B1T1, held_B11S = self.places(size, sliding_window, each_row=always)
        if sliding_window is None:
            return held_B11S <= seen_by_B1T1
        return (held_B11S >= 0) & (held_B11S <= seen_by_B1T1) & (held_B11S > seen_by_B1T1 - sliding_window)

    def distances(self, size: int, sliding_window: int | None) -> Tensor:
        """Return the distance from each query back to each key: int64 (B or 1, 1, T, S), -1 for keys it must not see.

        Arguments as for :meth:`mask`.
        """
        seen_by_B1T1, held_B11S = self.places(size, sliding_window)
        distance_B1TS = seen_by_B1T1 - held_B11S
        seen_B1TS = (held_B11S >= 0) & (distance_B1TS >= 0)
        if sliding_window is not None:
            seen_B1TS &= distance_B1TS < sliding_window
        return torch.where(seen_B1TS, distance_B1TS, -1)

    def places(self, size: int, sliding_window: int | None, each_row: bool = False) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries, (B or 1, 1, T, 1), and of the slots' keys, in a broadcastable shape.

        Arguments as for :meth:`mask`; with ``each_row`` the first has a row for each batch row.
        """
        slots_S = torch.arange(min(self.used, size), device=self.positions_BT.device)
        # Rows at the same positions share a mask.
        positions_BT = self.positions_BT if self.start is None or each_row else self.positions_BT[:1]
        seen_by_B1T1 = positions_BT[:, None, :, None]
        if sliding_window is None:
            return seen_by_B1T1, slots_S[None, None, None]
        # The newest position in the buffer after this window is written. A key that a deeper window left beyond it is
        # thereby assigned a position one turn of the ring earlier, which lies outside the sliding window.
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

    The function replaces transformers' ``sdpa``, hence the arguments. Queries that share a key head are concatenated as
    if they were further tokens; prefill, and attention with sinks, softcap or an index, go to ``masked_attention``.
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


AttentionInterface.register(WINDOW_ATTENTION, window_attention)
AttentionMaskInterface.register(WINDOW_ATTENTION, sdpa_mask)


@contextmanager
def attending_in_windows(config: PretrainedConfig) -> Iterator[None]:
    """Make the model of a config use :func:`window_attention` inside the block."""
    with attending_by(config, WINDOW_ATTENTION), without_cudnn_attention():
        yield
