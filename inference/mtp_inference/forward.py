"""Run a model over windows: a prompt chunk by chunk, or a verify window of every row.

Shapes: B rows of the batch, R rows that are prefilled together, T window tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.cache.recurrent import undecided_states
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_train.trunk.load import Trunk

PREFILL_CHUNK = 2048
"""Prompt tokens per forward."""


def prefill_chunks(model: Trunk, cache: WindowCache, rows: slice, prompt_RT: Tensor, chunk: int) -> Iterator[Tensor]:
    """Run prompts of one length from position 0; yield the hidden states of each chunk, (R, T, D)."""
    for start in range(0, prompt_RT.shape[1], chunk):
        tokens_RT = prompt_RT[:, start : start + chunk]
        end = start + tokens_RT.shape[1]
        positions_RT = torch.arange(start, end, device=prompt_RT.device).expand(len(prompt_RT), -1)
        masks = cache.begin(Window(rows, positions_RT, end, start))
        with attending_in_windows(model.config):
            hidden_RTD = model.window_hidden(tokens_RT, positions_BT=positions_RT, masks=masks, cache=cache)
        cache.commit(None)
        yield hidden_RTD


def window_states(model: Trunk, cache: WindowCache, tokens_BT: Tensor, window: Window) -> Tensor:
    """Run a window after earlier ones without committing it; return its hidden states, (B, T, D)."""
    masks = cache.begin(window)
    with attending_in_windows(model.config), undecided_states(model.family):
        return model.window_hidden(tokens_BT, positions_BT=window.positions_BT, masks=masks, cache=cache)
