#!/usr/bin/env python
"""List the kernels of a decoding round by name, with their number of calls and their time.

    python inference/benchmarks/gpu_profile.py --device cuda --depths 3,0

On a GPU, the round is captured and its replay is profiled, as in the decoder. On a CPU, operations are listed instead
of kernels. The weights are random, which does not change the kernels. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mtp_inference.batch import RoundPlan
from mtp_inference.bench.clock import Piece, captured, now, time_alone
from mtp_inference.bench.round_costs import as_run, at_position, idle_batch
from mtp_inference.bench.subject import SHAPES, Subject, shape_subject
from mtp_inference.session import PENDING_PLACES

REPEATS, LISTED, NAME_CHARS = 20, 30, 90


@torch.inference_mode()
def profile_round(subject: Subject, num_rows: int, used: int, depth: int) -> dict[str, Any]:
    """Return the time of a round and its kernels, the slowest first.

    Args:
        subject: Trunk and head.
        num_rows: Rows of the batch.
        used: Positions in use after the round.
        depth: Drafts of the round.
    """
    device = subject.trunk.lm_head_VD.device
    on_gpu = device.type == "cuda"
    batch, _ = idle_batch(subject, num_rows, used, depth)
    plan = as_run(RoundPlan(depth, used, depth + 1, PENDING_PLACES, None), batch)

    run_round = at_position(batch, used - depth - 1, lambda: batch.run_round(plan))
    seconds = time_alone({"round": run_round}, device, REPEATS)["round"]
    run: Piece = captured(run_round) if on_gpu else run_round
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        run()
        now(device)
    taken_us: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiled.events():
        if not on_gpu or event.device_type == DeviceType.CUDA:
            name = event.name[:NAME_CHARS]
            taken_us[name] += event.time_range.elapsed_us()
            counts[name] += 1
    return {
        "depth": depth,
        "rows": num_rows,
        "used": used,
        "round_ms": 1000 * seconds,
        "num_kernels": counts.total(),
        "busy_ms": taken_us.total() / 1000,
        "kernels": [
            {"name": name, "count": counts[name], "ms": taken / 1000} for name, taken in taken_us.most_common(LISTED)
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each depth, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="9b")
    parser.add_argument("--depths", default="3,0", help="with commas between them")
    parser.add_argument("--rows", type=int, default=1, help="of the batch")
    parser.add_argument("--used", type=int, default=2048, help="positions in use after the round")
    options = parser.parse_args(arguments)
    subject = shape_subject(options.shape, dtype=torch.bfloat16, device=options.device, seed=0)
    results = []
    for depth in map(int, options.depths.split(",")):
        found = profile_round(subject, options.rows, options.used, depth)
        results.append(found)
        print(
            f"depth {depth}: a round takes {found['round_ms']:.3f} ms; {found['num_kernels']} kernels are busy for "
            f"{found['busy_ms']:.3f} ms"
        )
        for kernel in found["kernels"]:
            print(f"{kernel['ms']:10.3f} ms {kernel['count']:6d} x {kernel['name']}", flush=True)
    settings = {"device": str(options.device), "shape": options.shape, "dtype": "bfloat16", "torch": torch.__version__}
    print(json.dumps({"benchmark": "gpu_profile", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
