#!/usr/bin/env python
"""List which gains of a recorded ablation (`scripts/ablate.py`) survive Holm's correction over all gains.

    python scripts/recorded_ablation.py inference/benchmarks/objectives.json

The variance of a gain is the sum of its variance over groups of prompts (seeds pooled) and its variance over seeds,
with degrees of freedom by Welch and Satterthwaite. Older records have no counts by prompt and group, and intervals over
prompts only, which are too narrow where prompts of one group are alike. ``--widen`` scales these intervals, and
``--groups`` sets their degrees of freedom.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtp_train.acceptance.intervals import Spread, holm, t_quantile, two_sided_p

LEVEL = 0.05


def over_seeds(gains: Sequence[float]) -> Spread:
    """Return the spread of the mean gain over seeds; zero for a single seed, where it cannot be estimated."""
    if len(gains) < 2:
        return Spread(0.0, 1)
    return Spread(float(np.std(gains, ddof=1)) / math.sqrt(len(gains)), len(gains) - 1)


def together(*spreads: Spread) -> Spread:
    """Return the spread of a sum of independent sources, with degrees of freedom by Welch and Satterthwaite."""
    squares = [spread.error**2 for spread in spreads]
    if not sum(squares):
        return Spread(0.0, min(spread.freedom for spread in spreads))
    parts = sum(square**2 / spread.freedom for square, spread in zip(squares, spreads, strict=True))
    return Spread(math.sqrt(sum(squares)), max(1, math.floor(sum(squares) ** 2 / parts)))


def p_value(gain: float, spread: Spread | None) -> float | None:
    """Return the two-sided p-value of a gain; None where its spread is unknown."""
    if spread is None or not spread.error:
        return None
    return two_sided_p(gain / spread.error, spread.freedom)


def spread_over_prompts(row: Mapping[str, Any], prompts: int, widen: float, groups: int | None) -> Spread:
    """Return the spread that an interval over prompts implies, scaled by ``widen``."""
    low, high = row["gain_ci95"]
    error = widen * (high - low) / 2 / t_quantile(prompts - 1)
    return Spread(error, (prompts if groups is None else groups) - 1)


def judge(document: Mapping[str, Any], widen: float, groups: int | None) -> list[dict[str, Any]]:
    """Return every gain of a record with its p-value, and whether it survives the correction."""
    found = []
    for row in document["rows"]:
        if row["cell"] == document["reference"]:
            continue
        if "p_value" in row:
            p = row["p_value"]
        else:
            prompts = spread_over_prompts(row, document["prompts"], widen, groups)
            p = p_value(row["gain"], together(prompts, over_seeds(row["gain_of_seeds"])))
        found.append({"cell": row["cell"], "temperature": row["temperature"], "gain": row["gain"], "p_value": p})
    survives = holm([one["p_value"] for one in found], LEVEL)
    return [{**one, "survives": fell} for one, fell in zip(found, survives, strict=True)]


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Judge the gains of a record, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--widen", type=float, default=1.0, help="standard errors over groups over those over prompts")
    parser.add_argument("--groups", type=int, help="groups that the prompts belong to; else every prompt is one")
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.record.read_text(encoding="utf-8"))
    found = judge(document, arguments.widen, arguments.groups)
    for one in found:
        verdict = "survives" if one["survives"] else "-"
        p = "-" if one["p_value"] is None else f"{one['p_value']:.2g}"
        print(f"{one['cell']}  T={one['temperature']:g}  gain {one['gain']:+.3f}  p {p}  {verdict}")
    print(f"{sum(one['survives'] for one in found)} of {len(found)} survive")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
