"""The rows of one batch on the device: texts, caches and settings.

Shapes: B rows of the batch, T window tokens, D hidden, N stop tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import PREFILL_CHUNK, WindowCache, window_states
from mtp_inference.cache.rows import RowState, first_places, places_from
from mtp_inference.cache.window import Window
from mtp_inference.compiled_layers import CompiledLayers
from mtp_inference.cpu_layers import CpuLayers
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan
from mtp_inference.sampling.chooser import Chooser, DraftSampling
from mtp_inference.sampling.distributions import Sampling
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import Scratch, slow_halves

NO_TOKEN = -1
WIDE_ROWS = 4
"""Smallest number of batch rows whose rounds run in fp32, converting the weights in every round. At four rows, a model
of 64 million weights gains with three drafts per row (1.2 to 1.3 times the speed) and loses without drafts (0.8 to
0.9). A smaller model's figures vary too much to tell. Not measured on a processor with AVX2 only."""


class Batch(RowState):
    """The state of one batch, which :mod:`mtp_inference.round` reads and writes."""

    def __init__(
        self,
        trunk: Trunk,
        drafting: Drafting | None,
        size: BatchSize,
        draft_sampling: DraftSampling = "argmax",
        prefill_chunk: int = PREFILL_CHUNK,
        layers: CpuLayers | CompiledLayers | None = None,
        *,
        records: bool = False,
    ) -> None:
        self.trunk = trunk
        self.records = records
        self.size = size
        self.prefill_chunk = prefill_chunk
        weight = trunk.lm_head_VD
        rows = size.num_rows
        # Whether prefill and rounds multiply in fp32, converting the weights layer by layer. All rounds have the same
        # precision, with drafts or without, as another one may decide near ties differently.
        self.widens_prefill = slow_halves(weight.dtype, weight.device)
        self.widens_rounds = self.widens_prefill and rows >= WIDE_ROWS
        self.cache = WindowCache(
            trunk.config,
            num_rows=rows,
            capacity=size.capacity,
            max_window=size.max_window,
            max_undecided=size.depth + 1,
            dtype=weight.dtype if self.widens_prefill and not self.widens_rounds else None,
        )
        if not self.cache.converts:
            self.widens_prefill = self.widens_rounds
        self.chooser = Chooser([Sampling()] * rows, draft_sampling, weight.device)
        self.drafter: Drafter | None = None
        if drafting is not None and size.depth:
            self.drafter = drafting.make(trunk, size, self.cache)
        self.last_B = torch.zeros(rows, dtype=torch.long, device=weight.device)
        """The last committed tokens; the trunk's cache contains all tokens before them."""
        self.length_B = torch.zeros_like(self.last_B)
        """Positions of the last committed tokens; 0 in inactive rows."""
        self.active_B = torch.zeros_like(self.last_B, dtype=torch.bool)
        self.room_B = torch.zeros_like(self.last_B)
        """Number of new tokens until a row's limit."""
        self.depth_B = torch.zeros_like(self.last_B)
        """Largest number of drafts of a row to accept."""
        self.stop_BN = self.last_B.new_full((rows, size.num_stops), NO_TOKEN)
        self.owner: object = None
        """The session that decodes with these rows."""
        self.layers = layers or CpuLayers([])
        self._scratch = Scratch()

    def tensor(self, numbers: Sequence[Any]) -> Tensor:
        """Return int64 numbers, or rows of numbers, on the device of the batch."""
        return torch.tensor(numbers, dtype=torch.long, device=self.last_B.device)

    def set_rows(
        self, rows: slice, settings: Sequence[Sampling], limits: Sequence[int], stops: Sequence[frozenset[int]]
    ) -> None:
        """Set the sampling settings, the largest numbers of new tokens and the stop tokens of rows."""
        self.chooser.set_rows(rows, settings)
        width = self.stop_BN.shape[1]
        padded = [sorted(one) + [NO_TOKEN] * (width - len(one)) for one in stops]
        self.room_B[rows] = self.tensor(limits)
        self.stop_BN[rows] = self.tensor(padded)

    def run_window(self, plan: RoundPlan, window_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Run the trunk over a window of every row; return hidden states (B, T, D) and logits (B, T, V)."""
        positions_BT = places_from(self.length_B, window_BT.shape[1])
        window = Window(slice(0, len(window_BT)), positions_BT, plan.used, plan.start)
        hidden_BTD = window_states(self.trunk, self.cache, window_BT, window)
        return hidden_BTD, self.trunk.logits(hidden_BTD)

    def commit(self, tokens_BT: Tensor, accepted_B: Tensor, kept_B: Tensor) -> None:
        """Extend the texts by the first ``kept_B`` tokens (0 in inactive rows), and end those that are complete."""
        is_stop_BT = (tokens_BT[..., None] == self.stop_BN[:, None]).any(-1) & first_places(tokens_BT, kept_B)
        self.room_B -= kept_B
        last_B = tokens_BT.gather(1, accepted_B[:, None])[:, 0]
        self.last_B.copy_(torch.where(self.active_B, last_B, self.last_B))
        self.active_B &= (self.room_B > 0) & ~is_stop_BT.any(-1)
        # Inactive rows keep running, at position 0 of their buffers.
        self.length_B.copy_((self.length_B + kept_B) * self.active_B)

    def reset(self) -> None:
        self.layers.refresh()
        self.active_B.zero_()
        self.length_B.zero_()
        self.chooser.set_rows(slice(None), [Sampling()] * self.cache.num_rows)

    def widened(self, applies: bool) -> AbstractContextManager[None]:
        """Multiply in fp32 inside the block, if that ``applies``."""
        return self.trunk.computing_in(torch.float32, self._scratch) if applies else nullcontext()
