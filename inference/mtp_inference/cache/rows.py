"""State with a row for each row of a batch, so that the rows of finished texts can be dropped, and places in it.

Shapes: B rows, T tokens of the window, Z places of a buffer.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from mtp_inference.cache.window import Window

_SHAPE = re.compile(r"_([A-Z][A-Za-z0-9]*)$")


class RowState:
    """Base of objects with buffers that have a row for each batch row.

    Buffers are the attributes whose shape suffix contains B, such as ``last_B`` or ``state_LBHKV``: tensors, or dicts
    of tensors of that shape. Attributes that are ``RowState`` objects have buffers of their own.
    """

    @torch.no_grad()
    def keep_rows(self, rows_R: Tensor) -> None:
        """Keep these rows, int64 indices in the new order, and drop all others. Buffers move."""
        for name, value in list(vars(self).items()):
            shape = _SHAPE.search(name)
            if isinstance(value, RowState):
                value.keep_rows(rows_R)
            elif shape is not None and "B" in shape[1]:
                # One buffer at a time, so that each is freed before the next one is copied.
                setattr(self, name, select_rows(value, rows_R, dim=shape[1].index("B")))
        if "num_rows" in vars(self):
            self.num_rows = len(rows_R)


def select_rows(buffers: Any, rows_R: Tensor, dim: int = 0) -> Any:
    """Return copies of the given rows of a tensor, or of a dict of tensors; None stays None."""
    if isinstance(buffers, dict):
        return {name: select_rows(buffer, rows_R, dim) for name, buffer in buffers.items()}
    return None if buffers is None else buffers.index_select(dim, rows_R)


def places_from(first_B: Tensor, num_places: int) -> Tensor:
    """Return consecutive places of each row, int64 (B, T), from ``first_B`` on."""
    return first_B[:, None] + torch.arange(num_places, device=first_B.device)


def first_places(like_BT: Tensor, num_B: Tensor) -> Tensor:
    """Return a mask of the first ``num_B`` places of each row, bool (B, T), of a tensor (B, T, ...)."""
    return torch.arange(like_BT.shape[1], device=num_B.device) < num_B[:, None]


class PlacedState(RowState):
    """State of a layer at places that follow from positions, in buffers that are allocated when first written.

    What a rejected draft wrote stays at places that the next window overwrites before they are read, so rollback is not
    needed.
    """

    window: Window
    """The announced window."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.buffers_BZ: dict[str | int, Tensor] = {}

    def buffer(self, name: str | int, like_BT: Tensor, num_places: int, fill: int = 0) -> Tensor:
        """Return the buffer (B, Z, ...) for entries of a window (B, T, ...)."""
        if name not in self.buffers_BZ:
            self.buffers_BZ[name] = like_BT.new_full((self.num_rows, num_places, *like_BT.shape[2:]), fill)
        return self.buffers_BZ[name]

    def place(self, name: str | int, new_BT: Tensor, places_BT: Tensor, num_places: int, fill: int = 0) -> Tensor:
        """Write the window's entries (B, T, ...) at their places; return the buffer (B, Z, ...) of all rows."""
        buffer_BZ = self.buffer(name, new_BT, num_places, fill)
        buffer_BZ[self.window.row_index_B1, places_BT] = new_BT
        return buffer_BZ
