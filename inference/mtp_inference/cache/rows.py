"""State with a row for each row of a batch, so that the rows of finished texts can be dropped."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

_SHAPE = re.compile(r"_([A-Z][A-Za-z0-9]*)$")


class RowState:
    """Base of objects with buffers that have a row for each batch row.

    Buffers are the attributes whose shape suffix contains B, such as ``last_B`` or ``state_LBHKV``: tensors, or dicts
    and named tuples of tensors of that shape. Attributes that are ``RowState`` objects have buffers of their own.
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
    """Return copies of the given rows of a tensor, or of a dict or a named tuple of tensors; None stays None."""
    if buffers is None:
        return None
    if isinstance(buffers, Tensor):
        return buffers.index_select(dim, rows_R)
    if isinstance(buffers, dict):
        return {name: select_rows(buffer, rows_R, dim) for name, buffer in buffers.items()}
    return type(buffers)(*(select_rows(buffer, rows_R, dim) for buffer in buffers))
