"""Rotate queries and keys by their positions in one launch.

The formula is the one that most of transformers' models share: the first half of the rotated channels is paired with
the second half, and channels beyond them pass. :func:`fused_rotary` finds out whether a module uses it by running it.

Shapes: B rows, T tokens, H heads of queries or keys, X head width, R rotated channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtp_inference.kernels import run_on_gpus, torch_operation

Rotary = Callable[..., tuple[Tensor, Tensor]]
_WIDTH = 8
"""Head width at which a model's function is compared."""


def rotated_in_torch(part_BHTX: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Return rotated queries or keys, contiguous, by the operations of transformers' models."""
    width = cos_BTR.shape[-1]
    turned, passed = part_BHTX[..., :width], part_BHTX[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos_BTR[:, None] + torch.cat((-second, first), dim=-1) * sin_BTR[:, None]
    return torch.cat((turned, passed), dim=-1).contiguous()


@torch_operation("mtp_inference::rotate", mutates_args=())
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys (B, H, T, X) by one operation. All tensors have one dtype."""
    return rotated_in_torch(query, cos, sin), rotated_in_torch(key, cos, sin)


run_on_gpus(rotate, "launch_rotate")


def fused_rotary(stock: Rotary) -> Rotary | None:
    """Return a function that replaces a model's ``apply_rotary_pos_emb``; None if the model's formula is another one.

    Calls with other arguments, layouts or dtypes go to the model's own function.
    """
    if not _is_same_formula(stock, _WIDTH):
        return None
    passes = _is_same_formula(stock, _WIDTH // 2)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if options or named or not _is_covered(q, k, cos, sin, passes):
            return stock(q, k, cos, sin, *options, **named)
        found: tuple[Tensor, Tensor] = torch.ops.mtp_inference.rotate(q, k, cos, sin)
        return found

    return rotated


def _is_covered(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, passes: bool) -> bool:
    if not (q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape and q.shape[2] == cos.shape[1]):
        return False
    fits = q.shape[-1] == k.shape[-1] and (cos.shape[-1] == q.shape[-1] or (passes and cos.shape[-1] < q.shape[-1]))
    return fits and q.dtype == k.dtype == cos.dtype == sin.dtype


@torch.no_grad()
def _is_same_formula(stock: Rotary, num_rotated: int) -> bool:
    """Return whether a function rotates as :func:`rotated_in_torch` does, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    query, key, *tables = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((2, 4, 3, _WIDTH), (2, 1, 3, _WIDTH), *[(2, 3, num_rotated)] * 2)
    )
    try:
        found = stock(query, key, *tables)
    # Some models' functions take other arguments, or rotate all channels only; another package's needs a GPU.
    except Exception:
        return False
    ours = [rotated_in_torch(part, *tables) for part in (query, key)]
    return len(found) == 2 and all(torch.equal(*pair) for pair in zip(found, ours, strict=True))
