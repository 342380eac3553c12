"""Select rows of buffers, when the finished rows of a batch are dropped."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def select_rows(buffers: Any, rows_R: Tensor, dim: int = 0) -> Any:
    """Return copies of the given rows of buffers, in the structure of ``buffers``.

    Args:
        buffers: A tensor, a dict or a named tuple of tensors; None stays None.
        rows_R: int64, indices of the rows to keep.
        dim: Dimension of the rows.
    """
    if buffers is None:
        return None
    if isinstance(buffers, Tensor):
        return buffers.index_select(dim, rows_R)
    if isinstance(buffers, dict):
        return {name: select_rows(buffer, rows_R, dim) for name, buffer in buffers.items()}
    return type(buffers)(*(select_rows(buffer, rows_R, dim) for buffer in buffers))


def keep_rows_of(owner: Any, names: tuple[str, ...], rows_R: Tensor) -> None:
    """Replace the named buffers of an object by their given rows; attributes that do not exist yet are skipped."""
    for name in names:
        # One buffer at a time, so that each is freed before the next one is copied.
        if getattr(owner, name, None) is not None:
            setattr(owner, name, select_rows(getattr(owner, name), rows_R))
