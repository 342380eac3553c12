#!/usr/bin/env python
"""Print the gains of a recorded ablation (`scripts/ablate.py`), and which survive Holm's correction over all gains.

    python scripts/recorded_ablation.py inference/benchmarks/objectives.json

The variance of a gain is the sum of its variance over groups of prompts (seeds pooled) and its variance over seeds,
with degrees of freedom by Welch and Satterthwaite. Older records have no counts by prompt and group, and intervals over
prompts only, which are too narrow where prompts of one group are alike.

Prints a table (tau, and in brackets the gain with its 95 % interval, * where it survives), and last one line of JSON.
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


def judge(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every gain of a record with its p-value, and whether it survives the correction."""
    found = []
    for row in document["rows"]:
        if row["cell"] == document["reference"]:
            continue
        if "p_value" in row:
            p = row["p_value"]
        else:
            low, high = row["gain_ci95"]
            freedom = document["prompts"] - 1
            prompts = Spread((high - low) / 2 / t_quantile(freedom), freedom)
            p = p_value(row["gain"], together(prompts, over_seeds(row["gain_of_seeds"])))
        found.append({"cell": row["cell"], "temperature": row["temperature"], "gain": row["gain"], "p_value": p})
    survives = holm([one["p_value"] for one in found], LEVEL)
    return [{**one, "survives": fell} for one, fell in zip(found, survives, strict=True)]


def table(document: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a Markdown table: one line a cell, one column a temperature."""
    survivors = {(one["cell"], one["temperature"]) for one in found if one["survives"]}
    texts: dict[str, list[str]] = {}
    for row in sorted(document["rows"], key=lambda row: row["temperature"]):
        text = f"{row['tau']:.2f}"
        if row["cell"] != document["reference"]:
            low, high = row["gain_ci95"]
            text += f" ({row['gain']:+.2f}, {low:+.2f} to {high:+.2f})"
        mark = " *" if (row["cell"], row["temperature"]) in survivors else ""
        texts.setdefault(row["cell"], []).append(text + mark)
    return "\n".join("| " + " | ".join([*cell.split("-"), *columns]) + " |" for cell, columns in texts.items())


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Judge the gains of a record, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.record.read_text(encoding="utf-8"))
    found = judge(document)
    print(table(document, found))
    print(f"{sum(one['survives'] for one in found)} of {len(found)} survive")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
