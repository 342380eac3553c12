#!/usr/bin/env python
"""Compare ways to sample from a vocabulary: top-k and top-p, and the draw of a token.

    python inference/benchmarks/sampling.py --rows 1,4,8 --vocab 248320

``sort`` is the definition: it sorts the vocabulary like transformers' processors, and scans it to draw. ``decoder`` is
what the decoder runs (``mtp_inference/sampling/filters.py`` and ``scan.py``). Both keep the same tokens.

Times are in ms: on a CPU the process's CPU time, on a GPU captured graphs, each the median over the repeats.
``launches`` and ``mb`` are those of the path for GPUs, whatever the device is: each of torch's operations is one
launch, and the bytes are a lower bound, as sorts and ``topk`` read the vocabulary several times.

``peaked`` logits are a model's: most of the probability is on a few dozen tokens. ``flat`` logits are drawn from a
normal distribution, so that top-p keeps a large part of the vocabulary.

Shapes: B rows, T = 1 position, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_inference.bench.clock import Piece, take_turns, time_alone
from mtp_inference.bench.launches import LaunchCounter
from mtp_inference.bench.machine import cpu_name
from mtp_inference.bench.output import print_columns
from mtp_inference.sampling.distributions import Sampling, SamplingRows, draw
from mtp_inference.sampling.filters import keep_top

TEMPERATURE = 0.7
FILTERS = {
    "top-k 20": Sampling(temperature=TEMPERATURE, top_k=20),
    "top-p 0.95": Sampling(temperature=TEMPERATURE, top_p=0.95),
    "both": Sampling(temperature=TEMPERATURE, top_k=20, top_p=0.95),
}
NUM_LARGE = 40
"""Number of large logits in peaked ones."""


class Way(NamedTuple):
    """One way to sample."""

    keep_top: Callable[[Tensor, SamplingRows], Tensor]
    """Applies top-k and top-p to scores, in place."""
    draw: Callable[[Tensor, Tensor], Tensor]
    """Draws from weights with uniform numbers."""


def keep_top_by_sort(scores_BTV: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top-k, then top-p, with one sort."""
    vocab = scores_BTV.shape[-1]
    # Ascending like in transformers, but stable: of equal scores at the edge of top-p the first are dropped.
    sorted_BTV, order_BTV = scores_BTV.sort(dim=-1, stable=True)
    if rows.any_top_k:
        k_B = torch.where(rows.keeps_any_k_B, vocab, (rows.kth_B + 1).clamp(max=vocab))
        least_BT1 = sorted_BTV.gather(-1, (vocab - k_B)[:, None, None].expand(-1, scores_BTV.shape[1], 1))
        sorted_BTV.masked_fill_(sorted_BTV < least_BT1, -math.inf)
    if rows.any_top_p:
        dropped_BTV = sorted_BTV.softmax(-1).cumsum_(-1) <= rows.top_p_tail_B[:, None, None]
        dropped_BTV[..., -1] = False
        sorted_BTV.masked_fill_(dropped_BTV, -math.inf)
    return scores_BTV.scatter_(-1, order_BTV, sorted_BTV)


def draw_by_scan(p_BTV: Tensor, u_BT: Tensor) -> Tensor:
    """Draw by one cumulative sum over the vocabulary."""
    sums_BTV = p_BTV.cumsum(-1).masked_fill_(p_BTV <= 0.0, 0.0)
    total_BT1 = sums_BTV.amax(-1, keepdim=True)
    below_BT1 = total_BT1.nextafter(torch.zeros_like(total_BT1))
    threshold_BT1 = (u_BT[..., None] * total_BT1).minimum(below_BT1)
    return (sums_BTV > threshold_BT1).view(torch.uint8).argmax(-1)


WAYS = {"sort": Way(keep_top_by_sort, draw_by_scan), "decoder": Way(keep_top, draw)}


def peaked_logits(num_rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Return logits with ``NUM_LARGE`` large ones, fp32 (B, 1, V)."""
    logits_B1V = 2.0 * torch.randn(num_rows, 1, vocab, generator=generator)
    large = (num_rows, 1, min(NUM_LARGE, vocab))
    tokens_B1L = torch.randint(vocab, large, generator=generator)
    return logits_B1V.scatter_(-1, tokens_B1L, 12.0 + 3.0 * torch.randn(large, generator=generator))


def flat_logits(num_rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Return normal logits, fp32 (B, 1, V)."""
    return torch.randn(num_rows, 1, vocab, generator=generator)


LOGITS = {"peaked": peaked_logits, "flat": flat_logits}


def pieces(way: Way, logits_B1V: Tensor) -> dict[str, Piece]:
    """Return the steps of a way, each repeatable."""
    num_rows, device = len(logits_B1V), logits_B1V.device
    p_B1V, u_B1 = logits_B1V.softmax(-1), torch.full((num_rows, 1), 0.7, device=device)
    found: dict[str, Piece] = {"draw": lambda: way.draw(p_B1V, u_B1)}
    for name, sampling in FILTERS.items():
        rows = SamplingRows.stack([sampling] * num_rows, device)
        found[name] = lambda rows=rows: way.keep_top(logits_B1V / rows.temperature_B[:, None, None], rows)
    return found


def traffic(piece: Piece) -> tuple[int, float]:
    """Return the launches of a piece of work, and its megabytes."""
    with LaunchCounter() as counter:
        piece()
    return sum(counter.counts.values()), counter.num_bytes / 1e6


@torch.inference_mode()
def measure(num_rows: int, kind: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Time every step of every way on the same logits, and count its launches and bytes; return one record each."""
    device = torch.device(options.device)
    logits_B1V = LOGITS[kind](num_rows, options.vocab, torch.Generator().manual_seed(options.seed)).to(device)
    timed, counted = {}, {}
    for name, way in WAYS.items():
        timed |= {(name, step): piece for step, piece in pieces(way, logits_B1V).items()}
        # A meta tensor takes the path of a GPU.
        counted |= {(name, step): traffic(piece) for step, piece in pieces(way, logits_B1V.to("meta")).items()}
    by_name = {" ".join(key): piece for key, piece in timed.items()}
    if device.type == "cpu":
        seconds = {name: median(taken) for name, taken in take_turns(by_name, options.repeats, device).items()}
    else:
        seconds = time_alone(by_name, device, options.repeats)
    return [
        {
            "rows": num_rows,
            "logits": kind,
            "step": step,
            "way": name,
            "ms": round(1000 * seconds[f"{name} {step}"], 3),
            "launches": counted[name, step][0],
            "mb": round(counted[name, step][1], 1),
        }
        for name, step in timed
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=_sizes, default=[1, 4, 8], help="rows of the batch times positions of a window")
    parser.add_argument("--logits", choices=(*LOGITS, "all"), default="all")
    for name, default in {"vocab": 248_320, "threads": 1, "repeats": 5, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"found {text}; expected whole numbers from 1 on, with commas between them")
    return sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and last one line of JSON."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    on_gpu = options.device == "cuda"
    settings = vars(options) | {
        "hardware": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "temperature": TEMPERATURE,
        "timed": "captured graphs, median" if on_gpu else "CPU time, median",
    }
    kinds = LOGITS if options.logits == "all" else (options.logits,)
    results = [record for kind in kinds for rows in options.rows for record in measure(rows, kind, options)]
    print_columns(results)
    print(json.dumps({"benchmark": "sampling", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
