"""Time, on a CPU by the clock, on a GPU by its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

CPU_COPY_BYTES, GPU_COPY_BYTES = 1 << 27, 1 << 30
"""Beyond any cache."""
Piece = Callable[[], object]


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def time_alone(pieces: Mapping[str, Piece], device: torch.device, repeats: int) -> dict[str, float]:
    """Time pieces of work, each alone: nothing else runs on the device, and nothing overlaps.

    The pieces take turns in every repeat. On a GPU each is captured as a graph and replayed between two events, as
    rounds are: launching is not counted.

    Args:
        pieces: Work that may be repeated; on a GPU in fixed shapes, without waiting for the device.
        device: Where it runs.
        repeats: Times that count; one more goes before.

    Returns:
        Seconds of each, the median.
    """
    on_gpu = device.type == "cuda"
    timed = {name: captured(piece) if on_gpu else piece for name, piece in pieces.items()}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        for name, run in timed.items():
            seconds = _event_seconds(run) if on_gpu else _clock_seconds(run)
            if repeat:
                taken[name].append(seconds)
    return {name: median(seconds) for name, seconds in taken.items()}


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Return bytes per second, read and written together, of one large copy on the device."""
    size = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = time_alone({"copy": lambda: target.copy_(source)}, device, repeats)
    return 2 * size / seconds["copy"]


def _clock_seconds(run: Piece) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _event_seconds(run: Piece) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    run()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1000


def captured(piece: Piece) -> Piece:
    """Return what replays a piece of work on the GPU, captured as a graph."""
    # Libraries choose their kernels and allocate their workspaces in the runs before.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        piece()
        piece()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        piece()
    return graph.replay
