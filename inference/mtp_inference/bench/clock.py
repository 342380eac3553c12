"""Measure time: with the host's clock or the process's CPU time on a CPU, with CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from mtp_inference.capture import capture_graph

CPU_COPY_BYTES, GPU_COPY_BYTES = 1 << 27, 1 << 30
"""Sizes larger than any cache."""
Piece = Callable[[], object]


def now(device: torch.device) -> float:
    """Synchronise with the device, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def worked(device: torch.device) -> float:
    """Return a time in seconds that other processes change little: on a CPU the CPU time of this process's threads."""
    return time.process_time() if device.type == "cpu" else now(device)


def take_turns(parts: Mapping[str, Piece], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each part in each repeat, by :func:`worked`.

    The parts take turns in every repeat, so a machine that slows down for a while changes all of them. One more repeat
    comes first and is not counted.
    """
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        for name, part in parts.items():
            started = worked(device)
            part()
            if repeat:
                taken[name].append(worked(device) - started)
    return taken


@torch.inference_mode()
def time_alone(pieces: Mapping[str, Piece], device: torch.device, repeats: int) -> dict[str, float]:
    """Time pieces of work one at a time, without overlap on the device.

    The pieces take turns in every repeat. On a GPU each piece is captured as a graph like rounds are, and replayed
    between two events, so launches are not counted.

    Args:
        pieces: Repeatable work; on a GPU in fixed shapes and without synchronisation.
        device: Device that the pieces run on.
        repeats: Number of timed repeats, after one warm-up.

    Returns:
        Median seconds of each piece.

    Raises:
        RuntimeError: A piece cannot be captured.
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
    """Return the bytes per second, read plus written, of one large copy on the device."""
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
    """Capture a piece of work as a CUDA graph; return the function that replays it."""
    # Run before capturing: libraries choose kernels and allocate workspaces.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        piece()
        piece()
    torch.cuda.synchronize()
    graph, _ = capture_graph(piece, None, stream)
    return graph.replay
