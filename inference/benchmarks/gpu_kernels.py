"""Parts of ``gpu.py`` for a device and its kernels: what the device can do at best, and where a round's time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from cpu import Row, now
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mtp_inference import Request, SpeculativeDecoder

ROWS, LAUNCHES, COPY_BYTES, MOST_KERNELS = (1, 4, 384, 1536), 1000, 2**30, 25


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return the mean seconds of a call, after one that is not counted."""
    call()
    started = now(device)
    for _ in range(10):
        call()
    return (now(device) - started) / 10


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory of tensors since the cell began; None on a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def machine(device: torch.device, width: int, vocab_size: int) -> Row:
    """Return versions, and cells of launches, copies, Triton and products with an output matrix."""
    on_gpu, one = device.type == "cuda", torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    def launched(in_graph: bool) -> Row:
        call = launches
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launches()
            call = graph.replay
        return {"microseconds": round(1e6 * seconds_of(call, device) / LAUNCHES, 3)}

    def compiled() -> Row:
        call = torch.compile(lambda given: (given.sin() * 2).relu())
        return {"microseconds": round(1e6 * seconds_of(partial(call, torch.ones(4096, device=device)), device), 1)}

    def copied(source: str) -> Row:
        count = COPY_BYTES if on_gpu else COPY_BYTES // 64
        given = torch.ones(count, dtype=torch.uint8, device=source, pin_memory=on_gpu and source == "cpu")
        taken = torch.empty(count, dtype=torch.uint8, device=device)
        call = partial(taken.copy_, given, non_blocking=True)
        return {"gb_per_second": round(count / seconds_of(call, device) / 1e9, 1)}

    def product(rows: int) -> Row:
        given, weight = (torch.ones(size, width, dtype=torch.bfloat16, device=device) for size in (rows, vocab_size))
        seconds = seconds_of(lambda: given @ weight.T, device)
        rates = {
            "gb_per_second": weight.nbytes / seconds / 1e9,
            "tflop_per_second": rows * weight.nbytes / seconds / 1e12,
        }
        return {"ms": round(1e3 * seconds, 4)} | {name: round(rate, 2) for name, rate in rates.items()}

    cells: Row = {
        "versions": {found.name: found.version for found in metadata.distributions()},
        "launch": partial(launched, False),
        **{f"copy from {source} to {device.type}": partial(copied, source) for source in {"cpu", device.type}},
        **{f"{rows} x {width} x {vocab_size}": partial(product, rows) for rows in ROWS},
    }
    return cells | ({"launch in a graph": partial(launched, True), "Triton": compiled} if on_gpu else {})


def profiled(decoder: SpeculativeDecoder, request: Request, device: torch.device) -> Row:
    """Return the kernels of a text's rounds, after prefill and the capture of graphs, and the time between them."""
    decoder.generate([request])
    chunks = decoder.stream([request])
    next(chunks)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        (*_, last) = chunks
        now(device)
    (again,) = decoder.generate([request])
    found = {"graphs": decoder.captured_rounds, "round_ms": round(1e3 * again.seconds_decode / again.rounds, 3)}
    return found | kernel_times(profiler.events(), device, last.result.rounds)


def kernel_times(events: Iterable[Any], device: torch.device, rounds: int) -> Row:
    """Return the launches, kernels and gaps of a round; on a CPU, operations that call no other one are the kernels."""
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = [one for one in events if one.device_type == kind and (on_gpu or not one.cpu_children)]
    kernels.sort(key=lambda one: one.time_range.start)
    times, counts, gaps = Counter[str](), Counter[str](), 0.0
    ended = kernels[0].time_range.start
    for one in kernels:
        times[one.name] += one.time_range.elapsed_us()
        counts[one.name] += 1
        gaps += max(0.0, one.time_range.start - ended)
        ended = max(ended, one.time_range.end)

    def ms(microseconds: float) -> float:
        return round(microseconds / rounds / 1e3, 4)

    return {
        "launches": round(len(kernels) / rounds, 1),
        "span_ms_while_profiled": ms(ended - kernels[0].time_range.start),
        "gaps_ms": ms(gaps),
        "kernels": [
            [name[:100], round(counts[name] / rounds, 1), ms(time)] for name, time in times.most_common(MOST_KERNELS)
        ],
    }


def streamed(decoder: SpeculativeDecoder, requests: list[Request], device: torch.device) -> Row:
    """Return the time of prefill and the median time of a round of texts that are decoded together."""
    times = [now(device)]
    for chunk in decoder.stream(requests):
        # The last text's first chunk follows the prefill of all.
        if chunk.index == len(requests) - 1:
            times.append(now(device))
    # The capture of graphs takes a few of the intervals.
    prefill, *rounds = (second - first for first, second in pairwise(times))
    return {
        "prefill_seconds": round(prefill, 3),
        "round_ms": round(1e3 * median(rounds), 3),
        "peak_bytes": peak_bytes(device),
    }
