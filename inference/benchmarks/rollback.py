#!/usr/bin/env python
"""Compare ways to roll back a Gated DeltaNet layer after a verify window, when each row keeps a prefix of the window.

    python inference/benchmarks/rollback.py --rows 1,4,16 --window 2,4,8

A way runs the window, stores some tensors, and at commit computes from them the state after each row's last kept token.
All ways are exact. ``corrections`` is used by the decoder (``mtp_inference/cache/delta.py`` has the mathematics).
``states`` loops over the tokens and stores every state. ``replay`` stores the inputs and runs the window again, with
beta = 0 and a decay of 1 for tokens after the kept prefix. The states of all layers are in one buffer, where commit
writes them.

Times are for all layers together. On a CPU they are the minimum over the repeats. On a GPU they are medians, and each
phase is captured as a graph like the decoder's rounds, since eager launches would rank the ways by number of kernels.

Shapes: L layers, B rows, R = L * B, T tokens of the window, H value heads, K key width, V value width, N = B * H.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_inference.bench.clock import Piece, time_alone
from mtp_inference.bench.output import print_columns
from mtp_inference.cache.delta import MAX_WINDOW, DeltaWindow, gated_delta_window


class DeltaInputs(NamedTuple):
    """Inputs of one layer's window, with the names and shapes of :func:`gated_delta_window`."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor


class Shape(NamedTuple):
    """Sizes of one layer's window."""

    rows: int
    window: int
    heads: int
    key_heads: int
    key_width: int
    value_width: int


class Way(NamedTuple):
    """One way to roll back."""

    run: Callable[[DeltaInputs], tuple[Tensor, Any]]
    """Maps inputs to the outputs (B, T, H, V) and a tuple of the tensors to store until the commit."""
    commit: Callable[[Sequence[Any], Tensor, Tensor], None]
    """Called with the stored tensors of each layer, the number of kept tokens per row (int64, (B,)), and the states of
    all layers before the window (fp32, (L, B, H, K, V), contiguous), which it replaces by the states after the kept
    tokens."""


def gated_delta_per_token(inputs: DeltaInputs) -> tuple[Tensor, tuple[Tensor]]:
    """Run the rule token by token, and store the state after each token, (T, N, K, V)."""
    query, key, value, g, beta, initial_state = inputs
    num_rows, num_tokens, num_heads, value_width = value.shape
    key_width, flat, out_dtype = key.shape[-1], num_rows * num_heads, query.dtype
    if key.shape[2] != num_heads:
        query, key = (heads.repeat_interleave(num_heads // key.shape[2], dim=2) for heads in (query, key))
    query, key, value, beta, decay = (part.transpose(0, 1).float() for part in (query, key, value, beta, g.exp()))
    query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    # Terms without the state are computed before the loop, which leaves three operations per token.
    erase_TN1K = (key * (beta * decay)[..., None]).reshape(num_tokens, flat, 1, key_width)
    write_TN1V = (value * beta[..., None]).reshape(num_tokens, flat, 1, value_width)
    key_TNK1, decay_TN11 = key.reshape(num_tokens, flat, key_width, 1), decay.reshape(num_tokens, flat, 1, 1)
    states_TNKV = value.new_empty(num_tokens, flat, key_width, value_width)
    state_NKV = initial_state.flatten(0, 1)
    for token in range(num_tokens):
        delta_N1V = torch.baddbmm(write_TN1V[token], erase_TN1K[token], state_NKV, alpha=-1)
        state_NKV = torch.mul(state_NKV, decay_TN11[token], out=states_TNKV[token])
        state_NKV.baddbmm_(key_TNK1[token], delta_N1V)
    query_TN1K = query.reshape(num_tokens, flat, 1, key_width) * key_width**-0.5
    output = (query_TN1K @ states_TNKV).reshape(num_tokens, num_rows, num_heads, value_width)
    return output.transpose(0, 1).to(out_dtype), (states_TNKV,)


def commit_states(kept: Sequence[tuple[Tensor]], num_kept_B: Tensor, state_LBHKV: Tensor) -> None:
    """Select each row's state layer by layer, since joining the layers would copy all stored states.

    Every row must keep a token: the state before the window is not stored.
    """
    num_flat = kept[0][0].shape[1]
    flat_N = torch.arange(num_flat, device=num_kept_B.device)
    index_N = (num_kept_B - 1).repeat_interleave(state_LBHKV.shape[2]) * num_flat + flat_N
    for (states_TNKV,), out_BHKV in zip(kept, state_LBHKV, strict=True):
        torch.index_select(states_TNKV.flatten(0, 1), 0, index_N, out=out_BHKV.flatten(0, 1))


def run_window(inputs: DeltaInputs) -> tuple[Tensor, DeltaWindow]:
    """Run the decoder's kernel, and store its own record of the window."""
    return gated_delta_window(**inputs._asdict(), use_qk_l2norm_in_kernel=True)


def run_for_replay(inputs: DeltaInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the decoder's kernel for its outputs, and store the inputs that determine the state."""
    return run_window(inputs)[0], inputs[1:5]


def commit_replay(kept: Sequence[tuple[Tensor, ...]], num_kept_B: Tensor, state_LBHKV: Tensor) -> None:
    """Run the windows of all layers again without the rejected tokens, and commit their states."""
    key, value, g, beta = (torch.cat(parts) for parts in zip(*kept, strict=True))
    num_tokens, num_kept_R = g.shape[1], num_kept_B.repeat(len(kept))
    is_kept_RT1 = (torch.arange(num_tokens, device=g.device) < num_kept_R[:, None])[..., None]
    state_RHKV = state_LBHKV.flatten(0, 1)
    # The outputs are not used, so keys are passed as queries.
    _, window = run_window(DeltaInputs(key, key, value, g * is_kept_RT1, beta * is_kept_RT1, state_RHKV))
    window.commit(torch.full_like(num_kept_R, num_tokens), state_RHKV)


def commit_corrections(kept: Sequence[DeltaWindow], num_kept_B: Tensor, state_LBHKV: Tensor) -> None:
    """Add the corrections of the kept tokens for all layers at once, like ``cache/recurrent.py``."""
    state_RHKV = state_LBHKV.flatten(0, 1)
    kept[0].joined(kept, state_RHKV).commit(num_kept_B.repeat(len(kept)), state_RHKV)


WAYS = {
    "states": Way(gated_delta_per_token, commit_states),
    "replay": Way(run_for_replay, commit_replay),
    "corrections": Way(run_window, commit_corrections),
}
PHASES = ("window_us", "commit_us", "both_us")


def draw_inputs(shape: Shape, seed: int, device: str) -> DeltaInputs:
    """Return a random fp32 window, equal on every device."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    window = (shape.rows, shape.window)
    query, key = draw(2, *window, shape.key_heads, shape.key_width)
    value = draw(*window, shape.heads, shape.value_width)
    g, beta = -draw(*window, shape.heads).abs(), draw(*window, shape.heads).sigmoid()
    initial_state = draw(shape.rows, shape.heads, shape.key_width, shape.value_width)
    return DeltaInputs(*(part.to(device) for part in (query, key, value, g, beta, initial_state)))


def draw_layers(shape: Shape, num_layers: int, device: str) -> tuple[list[DeltaInputs], Tensor]:
    """Return the windows of several layers, and the buffer (L, B, H, K, V) of their states before the windows."""
    layers = [draw_inputs(shape, seed, device) for seed in range(num_layers)]
    state_LBHKV = torch.stack([layer.initial_state for layer in layers])
    return [layer._replace(initial_state=state) for layer, state in zip(layers, state_LBHKV, strict=True)], state_LBHKV


def _time_once(way: Way, layers: list[DeltaInputs], num_kept_B: Tensor, state_LBHKV: Tensor) -> list[float]:
    """Return the seconds of each phase and of both together. Memory of the window is freed afterwards."""
    start = time.perf_counter()
    ran = [way.run(inputs) for inputs in layers]
    middle = time.perf_counter()
    way.commit([kept for _, kept in ran], num_kept_B, state_LBHKV)
    end = time.perf_counter()
    return [middle - start, end - middle, end - start]


def clock_times(
    layers: list[DeltaInputs], num_kept_B: Tensor, state_LBHKV: Tensor, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of the ``PHASES`` of every way, as the minimum over the repeats."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    order = Random(0)
    for _ in range(repeats + 1):
        # In a random order, so that no way always runs on the caches that the same other way left.
        for name in order.sample(list(WAYS), len(WAYS)):
            seconds[name].append(_time_once(WAYS[name], layers, num_kept_B, state_LBHKV))
    return {name: [min(phase) for phase in zip(*taken, strict=True)] for name, (_warm_up, *taken) in seconds.items()}


def graph_times(
    layers: list[DeltaInputs], num_kept_B: Tensor, state_LBHKV: Tensor, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of the ``PHASES`` of every way as captured graphs, as the median over the repeats."""
    pieces: dict[str, Piece] = {}
    for name, way in WAYS.items():
        for phase, piece in zip(PHASES, _phases(way, layers, num_kept_B, state_LBHKV), strict=True):
            pieces[f"{name} {phase}"] = piece
    seconds = time_alone(pieces, device, repeats)
    return {name: [seconds[f"{name} {phase}"] for phase in PHASES] for name in WAYS}


def _phases(way: Way, layers: list[DeltaInputs], num_kept_B: Tensor, state_LBHKV: Tensor) -> list[Piece]:
    def run() -> list[Any]:
        return [way.run(inputs)[1] for inputs in layers]

    # The graph of the commit reads tensors that were stored before its capture.
    kept = run()
    return [
        run,
        lambda: way.commit(kept, num_kept_B, state_LBHKV),
        lambda: way.commit(run(), num_kept_B, state_LBHKV),
    ]


@torch.inference_mode()
def measure(shape: Shape, num_layers: int, repeats: int, device: str) -> list[dict[str, object]]:
    """Time every way on the same layers, where each row keeps a random number of tokens, at least one.

    Returns one record per way; its ``kept_bytes`` exclude the states before the window.
    """
    layers, state_LBHKV = draw_layers(shape, num_layers, device)
    generator = torch.Generator().manual_seed(0)
    num_kept_B = torch.randint(1, shape.window + 1, (shape.rows,), generator=generator).to(device)
    if device == "cpu":
        seconds = clock_times(layers, num_kept_B, state_LBHKV, repeats)
    else:
        seconds = graph_times(layers, num_kept_B, state_LBHKV, repeats, torch.device(device))
    records = []
    for name, taken in seconds.items():
        times = {phase: round(1e6 * one, 1) for phase, one in zip(PHASES, taken, strict=True)}
        kept = [part for part in WAYS[name].run(layers[0])[1] if part is not layers[0].initial_state]
        kept_bytes = num_layers * sum(part.nbytes for part in kept)
        records.append({"rows": shape.rows, "window": shape.window, "way": name, **times, "kept_bytes": kept_bytes})
    return records


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"found {text}; expected whole numbers from 1 on, with commas between them")
    return sizes


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=_sizes, default=[1, 4, 16])
    parser.add_argument("--window", type=_sizes, default=[2, 4, 8], help=f"tokens, at most {MAX_WINDOW}")
    sizes = {"heads": 4, "key-heads": 2, "key-width": 32, "value-width": 32, "layers": 3, "repeats": 100}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if max(options.window) > MAX_WINDOW:
        parser.error(f"--window: found {max(options.window)}; expected at most {MAX_WINDOW}")
    if options.heads % options.key_heads:
        parser.error(f"--key-heads: found {options.key_heads}; expected a divisor of --heads, {options.heads}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and last one line of JSON."""
    options = _parse(arguments)
    settings = vars(options) | {
        "device_name": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "timed": "by the clock, least" if options.device == "cpu" else "captured graphs, median",
        "torch": torch.__version__,
    }
    results = []
    for rows, window in itertools.product(options.rows, options.window):
        shape = Shape(rows, window, options.heads, options.key_heads, options.key_width, options.value_width)
        results += measure(shape, options.layers, options.repeats, options.device)
    print_columns(results)
    print(json.dumps({"benchmark": "rollback", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
