#!/usr/bin/env python
"""Measure the limits of a GPU and its libraries, without code of this package.

    python inference/benchmarks/gpu_probe.py --device cuda

``ceilings`` has the rate of a large copy, the rate of weight-bound matrix products, and the time of a tiny kernel in a
captured graph. ``windows`` runs torch's attention on the decoder's shapes with each backend: the time of its first
call, its error against fp64, and its time inside a graph. ``unrolls`` runs it forward and backward with the mask of an
unrolled head, and counts values that are not finite: cuDNN's backward pass with a mask returns NaN where the length is
64 modulo 128 (pytorch#196678). ``default`` is the backend that torch chooses by itself.

A failed capture leaves the process in an undefined state. So graphs of the attention are captured last, and none after
a failure. The last line of the output has everything as JSON.

Shapes: B rows, T tokens, Q queries of a window, S keys in use, H heads, W width of a head.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mtp_inference.bench.clock import copy_bandwidth, now, time_alone

Row = dict[str, Any]
DTYPE = torch.bfloat16
HEADS, FREE_KEYS = 4, 1024
"""Heads of a window, and unused keys of the buffer: keys are slices of a larger buffer, like in a cache."""
CALLS_IN_GRAPH = 50
REPEATS = 20


class Sizes(NamedTuple):
    """Sizes of the measurements on a kind of device."""

    product: tuple[int, int]
    chain: int
    """Number of tiny kernels in a graph."""
    widths: tuple[int, ...]
    windows: tuple[tuple[int, int, int], ...]
    """(Q, S, B) of each window."""
    unrolls: tuple[int, ...]
    """T of each unrolled head."""
    backends: tuple[str, ...]


GPU = Sizes(
    (12_288, 4096),
    1000,
    (64, 128, 256),
    ((16, 2048, 1), (16, 16_384, 1), (16, 2048, 16)),
    (512, 576),
    ("default", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"),
)
CPU = Sizes((96, 64), 10, (32,), ((4, 48, 2),), (64,), ("default", "MATH"))


class Case(NamedTuple):
    """Inputs of one attention call and the backend that runs it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    backend: str

    def attend(self) -> Tensor:
        """Call torch's attention."""
        with _backend(self.backend):
            return scaled_dot_product_attention(self.query, self.key, self.value, self.mask)


def _backend(name: str) -> AbstractContextManager[Any]:
    return nullcontext() if name == "default" else sdpa_kernel([getattr(SDPBackend, name)])


def ceilings(sizes: Sizes, device: torch.device) -> Row:
    """Return the rates in bytes per second, and the seconds of a tiny kernel."""
    found: Row = {"copy_bytes_per_second": copy_bandwidth(device, REPEATS)}
    state_1D = torch.randn(1, 4096, device=device, dtype=DTYPE)

    def chain(length: int) -> None:
        moved_1D = state_1D
        for _ in range(length):
            moved_1D = moved_1D + 1

    lengths = {"long": 2 * sizes.chain, "short": sizes.chain}
    taken = time_alone({name: partial(chain, length) for name, length in lengths.items()}, device, REPEATS)
    found["tiny_kernel_seconds"] = (taken["long"] - taken["short"]) / sizes.chain
    # Several weights, so that none stays in the device cache.
    weights = [torch.randn(*sizes.product, device=device, dtype=DTYPE) for _ in range(4)]

    def multiply(state_RD: Tensor) -> None:
        for weight in weights:
            _ = state_RD @ weight.T

    for num_rows in (1, 4, 64):
        state_RD = torch.randn(num_rows, sizes.product[1], device=device, dtype=DTYPE)
        seconds = time_alone({"products": partial(multiply, state_RD)}, device, REPEATS)["products"]
        found[f"product_{num_rows}_rows_bytes_per_second"] = sum(one.nbytes for one in weights) / seconds
    return found


def window_cases(sizes: Sizes, device: torch.device) -> list[tuple[Row, Case]]:
    """Return attention calls of a verify window: few queries, many keys, rows of different lengths."""
    cases = []
    for width, (queries, used, rows) in itertools.product(sizes.widths, sizes.windows):
        query = torch.randn(rows, HEADS, queries, width, device=device, dtype=DTYPE)
        shape = (rows, HEADS, used + FREE_KEYS, width)
        key, value = (torch.randn(shape, device=device, dtype=DTYPE)[:, :, :used] for _ in range(2))
        last_B1Q1 = torch.randint(used // 2, used, (rows, 1, queries, 1), device=device)
        mask = torch.arange(used, device=device) <= last_B1Q1
        for backend in sizes.backends:
            row = {"width": width, "queries": queries, "keys": used, "rows": rows, "backend": backend}
            cases.append((row, Case(query, key, value, mask, backend)))
    return cases


def unroll_case(width: int, num_tokens: int, backend: str, device: torch.device) -> Case:
    """Return the attention call of depth 2 of an unrolled head: causal over depth 1, plus its own row.

    The first channel puts all scores far below 0, which triggers the error of cuDNN.
    """
    shape = (2, 8, num_tokens, width)
    query = 0.1 * torch.randn(shape, device=device, dtype=DTYPE)
    key, value = (0.1 * torch.randn(2, 8, 2 * num_tokens, width, device=device, dtype=DTYPE) for _ in range(2))
    query[..., 0], key[..., 0] = 1.0, -120 * width**0.5
    seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    mask = torch.cat([seen, torch.eye(num_tokens, dtype=torch.bool, device=device)], dim=1)[None, None]
    return Case(*(one.requires_grad_(True) for one in (query, key, value)), mask, backend)


def first_call(case: Case, device: torch.device) -> Row:
    """Run a window for the first time; return its milliseconds and its relative error against fp64."""
    started = now(device)
    output = case.attend()
    seconds = now(device) - started
    exact = scaled_dot_product_attention(case.query.double(), case.key.double(), case.value.double(), case.mask)
    return {"first_ms": 1000 * seconds, "relative_error": float((output.double() - exact).norm() / exact.norm())}


def trained_call(case: Case, device: torch.device) -> Row:
    """Run forward and backward; return the milliseconds and the number of values that are not finite."""
    started = now(device)
    output = case.attend()
    output.backward(torch.randn_like(output))
    seconds = now(device) - started
    gradients = {"query": case.query.grad, "key": case.key.grad, "value": case.value.grad}
    broken = {name: int((~grad.isfinite()).sum()) for name, grad in gradients.items() if grad is not None}
    return {"first_ms": 1000 * seconds, "not_finite": {"output": int((~output.isfinite()).sum()), **broken}}


def tried(row: Row, measure: Callable[[], Row]) -> Row:
    """Add a measurement, or its error, to a row, and print the row."""
    try:
        row |= measure()
    except RuntimeError as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    print(json.dumps(row), flush=True)
    return row


def time_in_graphs(cases: Sequence[tuple[Row, Case]], device: torch.device) -> str | None:
    """Add the microseconds of a call in a graph to each row; return the error of the first failure, else None."""
    for row, case in cases:
        if "error" in row:
            continue

        try:
            row["graph_us"] = (
                1e6 * time_alone({"calls": partial(_repeated, case)}, device, REPEATS)["calls"] / CALLS_IN_GRAPH
            )
        except RuntimeError as error:
            return f"{row}: {' '.join(str(error).split())[:200]}"
    return None


def _repeated(case: Case) -> None:
    for _ in range(CALLS_IN_GRAPH):
        case.attend()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every row when it is measured, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda")
    device = parser.parse_args(arguments).device
    sizes = CPU if device.type == "cpu" else GPU
    torch.manual_seed(0)
    started = time.perf_counter()
    found: dict[str, Any] = {"ceilings": tried({}, lambda: ceilings(sizes, device))}
    windows = window_cases(sizes, device)
    found["windows"] = [tried(row, partial(first_call, case, device)) for row, case in windows]
    found["unrolls"] = []
    for width, tokens, backend in itertools.product(sizes.widths, sizes.unrolls, sizes.backends):
        case = unroll_case(width, tokens, backend, device)
        row = {"width": width, "tokens": tokens, "backend": backend}
        found["unrolls"].append(tried(row, partial(trained_call, case, device)))
    found["capture_error"] = time_in_graphs(windows, device)
    settings = {"device": str(device), "torch": torch.__version__, "dtype": str(DTYPE)}
    seconds = time.perf_counter() - started
    print(json.dumps({"benchmark": "gpu_probe", "settings": settings, "seconds": seconds, "results": found}))


if __name__ == "__main__":
    main()
