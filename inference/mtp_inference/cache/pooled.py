"""Cache the pools of keys that an indexer chooses from, by position like keys
(``mtp_train.families.mechanisms.key_pools``).

Pools of a rejected draft stay at places that the next window overwrites before they are read.

Shapes: B rows, T tokens of the window, S slots, N keys of a pool, P pools, X width of the indexer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.cache.window import Window, announced
from mtp_train.families.mechanisms.key_pools import Pools
from mtp_train.heads.step import KeysWritten


class KeyPools:
    """A ``PoolStore`` (``mtp_train.families.mechanisms.key_pools``) with a slot for every position of a layer."""

    num_rows: int
    size: int
    window: Window | None
    inputs_BSX: Tensor | None = None
    pools: Pools | None = None
    keys_of: Window | None = None
    """The window whose keys are written. An indexer may choose before its window's keys are written, or after."""
    pools_of: Window | None = None

    @property
    def indexer_position_ids(self) -> None:
        """Always None: transformers would store all positions for its indexers here, ours do not need them."""
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Discard the positions."""

    def ending_with(self, inputs_BTX: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :class:`~mtp_train.families.mechanisms.key_pools.PoolStore`."""
        window = announced(self.window)
        if self.inputs_BSX is None:
            self.inputs_BSX = inputs_BTX.new_zeros(self.num_rows, self.size, inputs_BTX.shape[-1])
        slots_BT = window.slots_BT(self.size)
        self.inputs_BSX[window.row_index_B1, slots_BT] = inputs_BTX
        back_N = torch.arange(size - 1, -1, -1, device=inputs_BTX.device)
        slots_BTN = (slots_BT[..., None] - back_N).clamp(min=0)
        return self.inputs_BSX[window.row_index_B1[..., None], slots_BTN], slots_BTN

    def write_pools(self, new: Pools, number_BT: Tensor) -> Pools:
        """See :class:`~mtp_train.families.mechanisms.key_pools.PoolStore`."""
        window = announced(self.window)
        num_keys = new.slots_BPN.shape[-1]
        num_pools = self.size // num_keys
        if self.pools is None:
            # The last place takes tokens that complete no pool.
            keys_BPX = new.keys_BPX.new_zeros(self.num_rows, num_pools + 1, new.keys_BPX.shape[-1])
            self.pools = Pools(keys_BPX, new.slots_BPN.new_full((self.num_rows, num_pools + 1, num_keys), -1))
        places_BT = torch.where(number_BT < 0, num_pools, number_BT)
        for buffer, made in zip(self.pools, new, strict=True):
            buffer[window.row_index_B1, places_BT] = made
        self.pools_of = window
        if window.keys_only and self.keys_of is window:
            raise KeysWritten
        used = min(window.used // num_keys, num_pools)
        return Pools(*(buffer[window.rows, :used] for buffer in self.pools))
