"""Capture rounds as CUDA graphs and replay them.

A round of a small batch consists of hundreds of short kernels, and launching them takes longer than running them. The
whole round (drafts, verification, acceptance, commit) is one graph. Plain decoding is captured in the same way, so that
a measured speedup comes from the drafts alone.

Each plan of a round has its own graph. Plans are therefore rounded up first: positions in use to a multiple of a step,
pending tokens to the window of a round with drafts or to all places. Other devices run the same rounds without capture.
So does a GPU if a round cannot be captured: some kernels of transformers synchronise with the host (grouped experts do
on older GPUs). In torch 2.11 a failed capture breaks the allocator, which can then not free memory for another capture
(pytorch#180395), so the process captures no more rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from mtp_inference.batch import Batch
from mtp_inference.drafters.drafter import PENDING_PLACES, RoundPlan
from mtp_inference.round import run_round

FINE_STEP, COARSE_STEP = 1024, 4096
"""Positions in use are rounded up to multiples of these: masked keys cost less than another graph."""
FINE_LIMIT = 8192
SLOWER = "Rounds run one operation at a time from now on, which is slower for small batches; the text is the same."
RoundKey = tuple[RoundPlan, tuple[bool, ...]]
"""A plan, and the sampling steps of the batch: the key of a graph."""
_has_failed = False
"""Whether a capture failed in this process."""


class Rounds:
    """Run the rounds of a batch; ``captures`` only on CUDA devices."""

    def __init__(self, batch: Batch, captures: bool) -> None:
        self.batch = batch
        self.captures = captures
        self._graphs: dict[RoundKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: set[RoundKey] = set()

    def run(self, plan: RoundPlan) -> Tensor:
        """Run a round; return its outcome, which the next round may write over."""
        if self.captures:
            plan = round_up(plan, self.batch.cache.capacity)
            key = plan, self.batch.chooser.rows.steps
            if key in self._seen:
                # A capture executes nothing: if it fails, the round is still to run.
                self.captures = key in self._graphs or self._capture(key)
                if self.captures:
                    graph, outcome = self._graphs[key]
                    graph.replay()
                    return outcome
            # The first round with a key runs uncaptured: libraries choose kernels and allocate workspaces in it.
            self._seen.add(key)
        return run_round(self.batch, plan)

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def _capture(self, key: RoundKey) -> bool:
        """Capture a round without executing it; return whether that worked, and warn of the process's first failure."""
        global _has_failed
        if _has_failed:
            return False
        reason = ""
        for _ in range(2):
            try:
                self._graphs[key] = self._graph(key[0])
                return True
            except torch.OutOfMemoryError as error:
                # Once more: every capture frees cached memory first.
                reason = str(error)
            except RuntimeError as error:
                reason = reason or str(error)
                break
        _has_failed = True
        warnings.warn(f"decoder: a round cannot be captured ({reason}). {SLOWER}", stacklevel=3)
        return False

    def _graph(self, plan: RoundPlan) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a round that ran before; return its graph and the outcome that each replay writes."""
        pool = next((captured.pool() for captured, _ in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        # Other threads may allocate, and copy batches to the device, while this one captures.
        recording = torch.cuda.graph(graph, pool=pool, stream=_stream(), capture_error_mode="thread_local")
        try:
            with recording:
                outcome = run_round(self.batch, plan)
        except BaseException as error:
            torch.cuda.set_stream(before)
            # Ending a failed capture raises too; the original error is then the context.
            raise (error.__context__ if isinstance(error.__context__, RuntimeError) else error) from None
        return graph, outcome


@functools.cache
def _stream() -> torch.cuda.Stream:
    """Return the stream of all captures: libraries allocate workspaces for each stream."""
    return torch.cuda.Stream()


def read_later(outcome: Tensor) -> Callable[[], list[list[int]]]:
    """Return a function that returns the rows of an outcome on the host.

    On a GPU they are copied while later rounds run; only the function waits for the copy.
    """
    if not outcome.is_cuda:
        return outcome.tolist
    host = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
    host.copy_(outcome, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[list[int]]:
        copied.synchronize()
        return host.tolist()

    return read


def round_up(plan: RoundPlan, capacity: int) -> RoundPlan:
    """Return a rounded-up plan whose graph is valid for this plan and for many others."""
    step = FINE_STEP if plan.used <= FINE_LIMIT else COARSE_STEP
    used = min(capacity, -(-plan.used // step) * step)
    # After a round with drafts at most its window is pending in a row; after plain rounds, any number.
    pending = plan.depth + 1 if plan.pending <= plan.depth + 1 else PENDING_PLACES
    return dataclasses.replace(plan, used=used, pending=pending, start=None)
