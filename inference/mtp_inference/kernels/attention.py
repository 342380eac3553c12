"""Attend from a window's tokens to the keys of their rows, with split keys and lengths that are read on the device.

No library has a kernel for these windows. flash-attn, and torch's copy of it, do not compute in fp32, expect values as
wide as keys and the keys of a sliding window in consecutive slots; the copy splits keys only for windows of one token.
FlashInfer plans its splits on the host, which does not know the lengths. flex_attention is compiled for each shape of a
window, and building its block mask takes several launches in each window.

Shapes: B rows, T tokens of the window, H heads, K key heads, S slots, X key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_inference.kernels import run_on_gpus, torch_operation

MAX_KEY_BYTES = 1024
"""Bytes of the widest key or value. Even the smallest blocks of wider ones exceed the 64 KiB of shared memory that a
program may take on gfx942."""


def is_narrow(key: Tensor, value: Tensor) -> bool:
    """Return whether keys and values are narrow enough for the kernel."""
    return max(key.shape[-1], value.shape[-1]) * key.element_size() <= MAX_KEY_BYTES


def attended_slots(positions_BT: Tensor, reach: int, num_slots: int) -> Tensor:
    """Return the attention mask over slots, bool (B, 1, T, S).

    Args:
        positions_BT: int64, the position of each query; its row's newest key is that of the last query.
        reach: Number of positions that a query attends to, its own included.
        num_slots: S; the key of position p is in slot ``p % S``.
    """
    slots_S = torch.arange(num_slots, device=positions_BT.device)
    newest_B1 = positions_BT[:, -1:]
    held_B11S = (newest_B1 - (newest_B1 - slots_S) % num_slots)[:, None, None]
    seen_by_B1T1 = positions_BT[:, None, :, None]
    return (held_B11S >= 0) & (held_B11S <= seen_by_B1T1) & (held_B11S > seen_by_B1T1 - reach)


def attend_in_torch(
    query_BHTX: Tensor,
    key_BKSX: Tensor,
    value_BKSV: Tensor,
    positions_BT: Tensor,
    reach: int,
    scaling: float,
    sinks_H: Tensor | None,
    softcap: float,
) -> Tensor:
    """Return the attention of a window, (B, T, H, V), by torch operations.

    Args:
        query_BHTX: The window's queries; H is a multiple of K.
        key_BKSX: Keys, those of the window included.
        value_BKSV: Values.
        positions_BT: See :func:`attended_slots`.
        reach: See :func:`attended_slots`.
        scaling: Factor of the scores.
        sinks_H: Attention sinks: scores without a key; None for none.
        softcap: The c of ``c tanh(scores / c)``; 0 for no bound.
    """
    group = query_BHTX.shape[1] // key_BKSX.shape[1]
    key_BHSX, value_BHSV = (part.repeat_interleave(group, dim=1).float() for part in (key_BKSX, value_BKSV))
    score_BHTS = query_BHTX.float() @ key_BHSX.mT * scaling
    if softcap > 0:
        score_BHTS = softcap * torch.tanh(score_BHTS / softcap)
    is_seen_B1TS = attended_slots(positions_BT, reach, key_BKSX.shape[2])
    score_BHTS = score_BHTS.masked_fill(~is_seen_B1TS, -torch.inf)
    if sinks_H is not None:
        sink_BHT1 = sinks_H.to(query_BHTX.dtype)[None, :, None, None].expand(*score_BHTS.shape[:3], 1)
        score_BHTS = torch.cat([score_BHTS, sink_BHT1], dim=-1)
    weight_BHTS = score_BHTS.softmax(dim=-1)[..., : key_BKSX.shape[2]]
    # A query before position 0 attends to no key; the softmax of its scores is NaN.
    weight_BHTS = weight_BHTS.masked_fill(~is_seen_B1TS, 0.0)
    return (weight_BHTS @ value_BHSV).to(query_BHTX.dtype).transpose(1, 2).contiguous()


@torch_operation("mtp_inference::attend_window", mutates_args=())
def attend_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    reach: int,
    scaling: float,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """Return the attention of a window by one operation; see :func:`attend_in_torch`."""
    return attend_in_torch(query, key, value, positions, reach, scaling, sinks, softcap)


run_on_gpus(attend_window, "launch_attend_window")
