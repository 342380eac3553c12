"""Rounds without the host: captured once as a CUDA graph, then replayed.

A round of a small batch is hundreds of short kernels; launching them one by one takes longer than they do. The whole
round (drafts, verification, acceptance, commit) is one graph. Plain decoding is captured in the same way, so that a
speedup over it is the drafts' own.

Each plan of a round has a graph. Plans are therefore rounded up first: positions in use to steps, pending tokens to
what follows a round with drafts or to all places. Other devices run the same rounds as they are, and so does a GPU
where a round cannot be captured.
"""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor

from mtp_inference.batch import Batch, RoundPlan

FINE_STEP, COARSE_STEP = 1024, 4096
"""Positions in use are rounded up to these: reading masked keys costs less than another graph."""
FINE_LIMIT = 8192
SLOWER = "Rounds run one operation at a time from now on, which is slower for small batches; the text is the same."
RoundKey = tuple[RoundPlan, tuple[bool, ...]]
"""A plan, and the sampling steps of the batch."""


class Rounds:
    """Run the rounds of a batch.

    Args:
        batch: The batch.
        captures: Whether to capture; only CUDA devices can.
    """

    def __init__(self, batch: Batch, captures: bool) -> None:
        self.batch = batch
        self.captures = captures
        self._graphs: dict[RoundKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: set[RoundKey] = set()
        self._stream = torch.cuda.Stream() if captures else None

    def run(self, plan: RoundPlan) -> Outcome:
        """Run a round; see :meth:`Batch.run_round`."""
        if not self.captures:
            return Outcome(self.batch.run_round(plan))
        plan = round_up(plan, self.batch.cache.capacity)
        key = plan, self.batch.chooser.steps
        if key not in self._seen:
            # The first one runs as it is: libraries choose their kernels and allocate their workspaces now.
            self._seen.add(key)
            return Outcome(self.batch.run_round(plan))
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(plan)
            except RuntimeError as error:
                # Some kernels of transformers wait for the host: grouped experts do on older GPUs. Nothing has run yet.
                self.captures = False
                warnings.warn(f"decoder: a round cannot be captured ({error}). {SLOWER}", stacklevel=2)
                return Outcome(self.batch.run_round(plan))
        graph, outcome = self._graphs[key]
        graph.replay()
        return Outcome(outcome)

    def _capture(self, plan: RoundPlan) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        shared = next((captured.pool() for captured, _ in self._graphs.values()), None)
        # Capturing records the round without running it: the replay that follows is the round.
        with torch.inference_mode(), torch.cuda.graph(graph, pool=shared, stream=self._stream):
            outcome = self.batch.run_round(plan)
        return graph, outcome


class Outcome:
    """What a round returned, on its way to the host.

    On a GPU it is copied while later rounds run; only reading it waits.
    """

    def __init__(self, outcome: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = outcome
        if outcome.is_cuda:
            self._tensor = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
            self._tensor.copy_(outcome, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def rows(self) -> list[list[int]]:
        """Return one list per batch row."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._tensor.tolist()
        return rows


def round_up(plan: RoundPlan, capacity: int) -> RoundPlan:
    """Return a plan that serves for this one and for many others."""
    step = FINE_STEP if plan.used <= FINE_LIMIT else COARSE_STEP
    used = min(capacity, -(-plan.used // step) * step)
    # After a round with drafts a row has at most its window pending; after plain rounds, any number.
    pending = plan.depth + 1 if plan.pending <= plan.depth + 1 else plan.most_pending
    return dataclasses.replace(plan, used=used, pending=pending, start=None)
