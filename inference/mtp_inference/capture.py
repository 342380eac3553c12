"""Rounds without the host: captured once as a CUDA graph, then replayed.

A round of a small batch is hundreds of short kernels; launching them one by one takes longer than they do. The whole
round (drafts, verification, acceptance, commit) is one graph. Plain decoding is captured in the same way, so that a
speedup over it is the drafts' own.

Each plan of a round has a graph. Plans are therefore rounded up first: positions in use to steps, pending tokens to
what follows a round with drafts or to all places. Other devices run the same rounds as they are, and so does a GPU
where a round cannot be captured: some kernels of transformers wait for the host (grouped experts do on older GPUs).

A capture that fails leaves torch on the capture's stream, and torch 2.11 with an allocator that asserts when it is to
give memory back (pytorch#180395), as each new capture asks it to. A child process tries first (``capture_probe.py``);
where one fails here all the same, the stream is put back and the process captures nothing more.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtp_inference.batch import Batch, RoundPlan

FINE_STEP, COARSE_STEP = 1024, 4096
"""Positions in use are rounded up to these: reading masked keys costs less than another graph."""
FINE_LIMIT = 8192
SLOWER = "Rounds run one operation at a time from now on, which is slower for small batches; the text is the same."
RoundKey = tuple[RoundPlan, tuple[bool, ...]]
"""A plan, and the sampling steps of the batch."""
_failure: str | None = None
"""Why a capture failed in this process; None where none has."""


class Rounds:
    """Run the rounds of a batch.

    Args:
        batch: The batch.
        captures: Whether to capture; only CUDA devices can.
        why_not: Asked before each capture, given whether the round samples: returns why such rounds cannot be
            captured, None where nothing is known against it.
    """

    def __init__(self, batch: Batch, captures: bool, why_not: Callable[[bool], str | None] | None = None) -> None:
        self.batch = batch
        self.captures = captures
        self._why_not = why_not
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
            reason = self._capture(key)
            if reason is not None:
                # Nothing of the round has run yet.
                self.captures = False
                warnings.warn(f"decoder: a round cannot be captured ({reason}). {SLOWER}", stacklevel=2)
                return Outcome(self.batch.run_round(plan))
        graph, outcome = self._graphs[key]
        graph.replay()
        return Outcome(outcome)

    @property
    def num_captured(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def _capture(self, key: RoundKey) -> str | None:
        """Capture a round without running it: its replay is the round. Return why that cannot be done, or None."""
        plan, steps = key
        refused = _failure or (self._why_not(any(steps)) if self._why_not is not None else None)
        if refused is not None:
            return refused
        shared = next((captured.pool() for captured, _ in self._graphs.values()), None)
        try:
            self._graphs[key] = capture_graph(partial(self.batch.run_round, plan), shared, self._stream)
        except RuntimeError as error:
            return str(error)
        return None


def capture_graph(
    run: Callable[[], Tensor], pool: Any, stream: torch.cuda.Stream | None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record what ``run`` does as a graph; return the graph and the tensor that its replays write.

    Args:
        run: Work in fixed shapes that has run before and does not wait for the device.
        pool: The memory pool to share; None for one of its own.
        stream: Where to record.

    Raises:
        RuntimeError: It cannot be captured. This process captures nothing more.
    """
    global _failure
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool, stream=stream):
            outcome = run()
    except BaseException as error:
        torch.cuda.set_stream(before)
        # Ending a capture that has failed fails as well; what made it fail is then the context.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        _failure = str(cause) or type(cause).__name__
        try:
            raise cause
        finally:
            # A traceback refers to this frame, and so to what the round has allocated.
            del cause
    return graph, outcome


def release_memory() -> None:
    """Give memory that no tensor uses back to the device, unless a failed capture has made that impossible."""
    if _failure is None:
        torch.cuda.empty_cache()


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
