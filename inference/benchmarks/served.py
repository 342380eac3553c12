#!/usr/bin/env python
"""Print the comparisons of ``served.md`` from the blocks of its record: the speed of an arm against that of another.

    python inference/benchmarks/served.py

A block is one comparison of servers; the logarithms of its ratios are one observation, Student's t is over blocks, and
Holm's correction over all rows. The output is one JSON document.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev

from mtp_train.acceptance.intervals import holm, t_quantile, two_sided_p

RECORD = Path(__file__).with_name("served.json")
PAIRS = (("stale", "none"), ("retrained", "none"), ("retrained1", "none"), ("retrained", "stale"))
CLIENTS = (1, 4)


def main() -> None:
    """Print a row for each engine, number of clients and pair of arms."""
    record = json.loads(RECORD.read_text())
    rows, p_values = [], []
    for engine in ("llama.cpp", "vllm"):
        for clients in CLIENTS:
            for arm, base in PAIRS:
                blocks = [one["arms"] for one in record[engine]["blocks"]]
                rates = [[block[f"{name}@{clients}"]["tokens_per_second"] for name in (arm, base)] for block in blocks]
                logarithms = [math.log(first / second) for first, second in rates]
                mean, error = fmean(logarithms), stdev(logarithms) / math.sqrt(len(logarithms))
                margin = t_quantile(len(logarithms) - 1) * error
                speed = [round(math.exp(one), 2) for one in (mean, mean - margin, mean + margin)]
                rows.append({"engine": engine, "clients": clients, "arm": arm, "against": base, "speed": speed})
                p_values.append(two_sided_p(mean / error, len(logarithms) - 1))
    survives = holm(p_values, 0.05)
    print(json.dumps([{**row, "holm": one} for row, one in zip(rows, survives, strict=True)]))


if __name__ == "__main__":
    main()
