"""Capture rounds as CUDA graphs and replay them.

A round of a small batch consists of hundreds of short kernels, and launching them takes longer than running them. The
whole round (drafts, verification, acceptance, commit) is one graph. Plain decoding is captured in the same way, so that
a measured speedup comes from the drafts alone.

Each plan of a round has its own graph. Plans are therefore rounded up first: positions in use to the capacity if all
attention reads lengths on the device (``kernels/attention.py``), else to a multiple of a step; pending tokens to the
window of a round with drafts or to all places. Other devices run the same rounds without capture. So does a GPU if a
round cannot be captured: some kernels of transformers synchronise with the host (grouped experts do on older GPUs).

A failed capture leaves torch on the capture's stream. In torch 2.11 it also breaks the allocator, which then raises an
assertion when it has to free memory (pytorch#180395), as every new capture requires. A child process therefore tries
first (``capture_probe.py``). If a capture still fails here, the stream is restored, and the process captures no more
rounds.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mtp_inference.batch import Batch, RoundPlan

FINE_STEP, COARSE_STEP = 1024, 4096
"""With masks, positions in use are rounded up to multiples of these: masked keys cost less than another graph."""
FINE_LIMIT = 8192
SLOWER = "Rounds run one operation at a time from now on, which is slower for small batches; the text is the same."
Result = TypeVar("Result")
RoundKey = tuple[RoundPlan, tuple[int, ...]]
"""A plan, and the sampling steps of the batch: the key of a graph."""
_failure: str | None = None
"""Reason of a failed capture in this process; None if none failed."""


class Rounds:
    """Run the rounds of a batch.

    Args:
        batch: The batch.
        captures: Whether to capture rounds; only for CUDA devices.
        why_not: Called before each capture with whether the round samples. Returns the reason why such rounds cannot be
            captured, or None.
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
        plan = round_up(plan, self.batch.cache.capacity, self.batch.reads_lengths)
        key = plan, self.batch.chooser.steps
        if key not in self._seen:
            # The first round with a key runs uncaptured: libraries choose kernels and allocate workspaces in it.
            self._seen.add(key)
            return Outcome(self.batch.run_round(plan))
        if key not in self._graphs:
            reason = self._capture(key)
            if reason is not None:
                # A capture executes nothing: run the round now.
                self.captures = False
                warnings.warn(f"decoder: a round cannot be captured ({reason}). {SLOWER}", stacklevel=2)
                return Outcome(self.batch.run_round(plan))
        graph, outcome = self._graphs[key]
        graph.replay()
        return Outcome(outcome)

    @property
    def num_captured(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def _capture(self, key: RoundKey) -> str | None:
        """Capture a round without executing it; return the reason if that fails, else None."""
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
    run: Callable[[], Result], pool: Any, stream: torch.cuda.Stream | None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture the operations of ``run`` as a graph; return the graph and the result of ``run``.

    A replay writes the tensors of the result.

    Args:
        run: Operations in fixed shapes, which have run before and do not synchronise with the device.
        pool: The memory pool to share; None for a new one.
        stream: Stream to capture on; None for torch's own.

    Raises:
        RuntimeError: The capture fails. The caller's stream is restored, and this process captures no more rounds.
    """
    global _failure
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool, stream=stream):
            outcome = run()
    except BaseException as error:
        torch.cuda.set_stream(before)
        # Ending a failed capture raises too; the original error is then the context.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        _failure = str(cause) or type(cause).__name__
        try:
            raise cause
        finally:
            # A traceback refers to this frame, and thereby to the tensors that the round has allocated.
            del cause
    return graph, outcome


def release_memory() -> None:
    """Free cached device memory that no tensor uses. Do nothing after a failed capture, as freeing would raise."""
    if _failure is None:
        torch.cuda.empty_cache()


class Outcome:
    """The outcome of a round, copied to the host.

    On a GPU it is copied while later rounds run; only :meth:`rows` waits for the copy.
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
        """Return the outcome as one list per batch row."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._tensor.tolist()
        return rows


def round_up(plan: RoundPlan, capacity: int, reads_lengths: bool) -> RoundPlan:
    """Return a rounded-up plan whose graph is valid for this plan and for many others.

    Args:
        plan: The plan.
        capacity: Number of positions of a row.
        reads_lengths: Whether positions that are not in use cost nothing; see :attr:`Batch.reads_lengths`.
    """
    step = FINE_STEP if plan.used <= FINE_LIMIT else COARSE_STEP
    used = capacity if reads_lengths else min(capacity, -(-plan.used // step) * step)
    # After a round with drafts at most its window is pending in a row; after plain rounds, any number.
    pending = plan.depth + 1 if plan.pending <= plan.depth + 1 else plan.most_pending
    return dataclasses.replace(plan, used=used, pending=pending, start=None)
