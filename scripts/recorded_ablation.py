#!/usr/bin/env python
"""Judge a recorded ablation (`scripts/ablate.py`) by its paired contrasts.

    python scripts/recorded_ablation.py inference/benchmarks/objectives.json

A contrast compares two cells that differ in one thing: a loss with the first loss, a text with the first text, an
unroll with the first unroll. The variance of its gain is the sum of its variance over groups of prompts (seeds pooled)
and its variance over seeds, with degrees of freedom by Welch and Satterthwaite. Holm's correction is over all gains.

Prints a table (tau, then each contrast's gain with its 95 % interval, * where it survives), and last one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtp_train.acceptance.counts import PromptCounts, tau
from mtp_train.acceptance.intervals import Difference, Spread, holm, tau_difference, two_sided_p
from mtp_train.checkpoints.files import read_json

LEVEL = 0.05
AXES = ("text", "unroll", "loss")
"""The parts of a cell's name, in this order."""


def over_seeds(gains: Sequence[float]) -> Spread:
    """Return the spread of the mean gain over seeds; zero for a single seed, where it cannot be estimated."""
    if len(gains) < 2:
        return Spread(0.0, 1)
    return Spread(float(np.std(gains, ddof=1)) / math.sqrt(len(gains)), len(gains) - 1)


def p_value(gain: float, spread: Spread | None) -> float | None:
    """Return the two-sided p-value of a gain; None where its spread is unknown."""
    if spread is None or not spread.error:
        return None
    return two_sided_p(gain / spread.error, spread.freedom)


def seeded_difference(first: Sequence[Sequence[PromptCounts]], second: Sequence[Sequence[PromptCounts]]) -> Difference:
    """Return the difference in tau of two cells with the same seeds and prompts; it has the spread over both."""
    difference = tau_difference(pooled(first), pooled(second))
    spread = over_seeds([tau(a) - tau(b) for a, b in zip(first, second, strict=True)])
    return difference._replace(spread=None if difference.spread is None else difference.spread.plus(spread))


def contrasts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the gain of every contrast of a record, with its p-value, and whether it survives the correction."""
    counts = document["counts"]
    first = document["reference"].split("-")
    groups = document["groups"]
    found = []
    for cell in counts:
        parts = cell.split("-")
        for axis, name in enumerate(AXES):
            other = "-".join([*parts[:axis], first[axis], *parts[axis + 1 :]])
            if other == cell or other not in counts:
                continue
            for temperature in counts[cell]:
                difference = seeded_difference(*(seeds_of(counts[one][temperature], groups) for one in (cell, other)))
                found.append(
                    {
                        "cell": cell,
                        "against": other,
                        "axis": name,
                        "temperature": float(temperature),
                        "gain": difference.value,
                        "gain_ci95": difference.ci95,
                        "p_value": p_value(difference.value, difference.spread),
                    }
                )
    survives = holm([one["p_value"] for one in found], LEVEL)
    return [{**one, "survives": fell} for one, fell in zip(found, survives, strict=True)]


def seeds_of(seeds: Sequence[Sequence[Sequence[int]]], groups: Mapping[str, str]) -> list[list[PromptCounts]]:
    """Return the counts of each seed's prompts, whose groups are by their names."""
    return [prompt_counts(prompts, groups.items()) for prompts in seeds]


def prompt_counts(prompts: Sequence[Sequence[int]], named: Iterable[tuple[object, str]]) -> list[PromptCounts]:
    """Return the counts of prompts from their rounds and accepted drafts, each prompt's name and its group."""
    return [
        PromptCounts(str(name), rounds, 0, (accepted,), 0, group)
        for (rounds, accepted), (name, group) in zip(prompts, named, strict=True)
    ]


def pooled(seeds: Sequence[Sequence[PromptCounts]]) -> list[PromptCounts]:
    """Return the counts of each prompt, summed over seeds."""
    return [
        PromptCounts(
            prompt_id=same[0].prompt_id,
            rounds=sum(one.rounds for one in same),
            num_draft_tokens=sum(one.num_draft_tokens for one in same),
            accepted_per_pos=tuple(map(sum, zip(*(one.accepted_per_pos for one in same), strict=True))),
            new_tokens=sum(one.new_tokens for one in same),
            group=same[0].group,
        )
        for same in zip(*seeds, strict=True)
    ]


def tables(document: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """Return two Markdown tables: tau of every cell, and the gain of every contrast; one column a temperature."""
    lines, counts = [], document["counts"]
    temperatures = sorted({one for of_cell in counts.values() for one in of_cell}, key=float)
    for cell, of_cell in counts.items():
        taus = (tau(pooled(seeds_of(of_cell[one], document["groups"]))) for one in temperatures)
        lines.append("| " + " | ".join([*cell.split("-"), *(f"{value:.2f}" for value in taus)]) + " |")
    lines.append("")
    by_pair: dict[tuple[str, str, str], list[str]] = {}
    for one in sorted(found, key=lambda one: (AXES.index(one["axis"]), one["temperature"])):
        low, high = one["gain_ci95"] or (math.nan, math.nan)
        text = f"{one['gain']:+.2f} [{low:+.2f}, {high:+.2f}]{' *' * one['survives']}"
        by_pair.setdefault((one["axis"], one["cell"], one["against"]), []).append(text)
    for (axis, cell, against), texts in by_pair.items():
        index = AXES.index(axis)
        cells, same = cell.split("-"), [part for number, part in enumerate(cell.split("-")) if number != index]
        lines.append(f"| {cells[index]} - {against.split('-')[index]} | {', '.join(same)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Judge the contrasts of a record, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    arguments = parser.parse_args(argv)
    document = read_json(arguments.record)
    found = contrasts(document)
    print(tables(document, found))
    print(f"{sum(one['survives'] for one in found)} of {len(found)} survive")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
