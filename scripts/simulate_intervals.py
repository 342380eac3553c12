#!/usr/bin/env python
"""Simulate three statistics of the gate: how often each passes a head without gain, and the coverage of its intervals.

    python scripts/simulate_intervals.py [--studies 2000]

Two equal heads decode prompts of several groups. Prompts of one group share their difficulty, and in part the
difference between the heads. The statistics are ``groups`` (the jackknife over groups of this package,
``mtp_train.acceptance.intervals``), ``prompts`` (the same with every prompt as its own group) and ``bootstrap``
(expanded percentiles of a bootstrap over groups). ``passed`` is nominally 0.025, ``covered`` (tau of one head) 0.95.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_train.acceptance.counts import PromptCounts, tau
from mtp_train.acceptance.intervals import t_quantile, tau_difference, tau_interval

DEPTH = 3
GROUPS = (5, 8, 12, 32, 64)
SIZES = {"one prompt a group": (1,), "five": (5,), "one to thirteen": (13, 2, 3, 1, 2)}
"""Numbers of prompts per group; groups take them in turns."""
RESAMPLES = 1000
Floats = NDArray[np.float64]


def head(rng: np.random.Generator, skill_P: Floats, groups: Sequence[str], spread: float) -> list[PromptCounts]:
    """Draw the counts of one head, given the log odds that a draft is accepted for each prompt."""
    length_P = rng.lognormal(math.log(60.0), spread, skill_P.shape)
    each_P1 = (1.0 / (1.0 + np.exp(-skill_P)))[:, None]
    share_PK1 = np.concatenate([each_P1 ** np.arange(DEPTH) * (1 - each_P1), each_P1**DEPTH], axis=-1)
    rounds_P = np.ceil(length_P / (1.0 + share_PK1 @ np.arange(DEPTH + 1))).astype(int)
    times_PK1 = rng.multinomial(rounds_P, share_PK1)
    reached_PK1 = times_PK1[:, ::-1].cumsum(axis=1)[:, ::-1]
    return [
        PromptCounts(f"p{number}", rounds, DEPTH * rounds, tuple(accepted), 0, None, groups[number])
        for number, (rounds, *accepted) in enumerate(reached_PK1.tolist())
    ]


def equal_heads(
    rng: np.random.Generator, num_groups: int, sizes: Sequence[int], spread: float
) -> tuple[list[PromptCounts], list[PromptCounts]]:
    """Draw one study of two heads with equal acceptance over the population of groups."""
    place_P = np.repeat(np.arange(num_groups), [sizes[number % len(sizes)] for number in range(num_groups)])
    ease_P = rng.normal(0.8, 0.8, num_groups)[place_P] + rng.normal(0.0, 0.3, len(place_P))
    names = [f"g{place}" for place in place_P]
    skills = [ease_P + rng.normal(0.0, 0.3, num_groups)[place_P] + rng.normal(0.0, 0.2, len(place_P)) for _ in range(2)]
    first, second = (head(rng, skill_P, names, spread) for skill_P in skills)
    return first, second


def passes(first: Sequence[PromptCounts], second: Sequence[PromptCounts]) -> bool:
    """Return whether the 95 % interval of the gain lies above 0."""
    ci95 = tau_difference(first, second).ci95
    return ci95 is not None and ci95[0] > 0.0


def bootstrap_passes(
    rng: np.random.Generator, first: Sequence[PromptCounts], second: Sequence[PromptCounts], num_groups: int
) -> bool:
    """Return whether the interval by expanded percentiles (Hesterberg, arXiv:1411.5279) over groups lies above 0."""
    totals_G4 = np.zeros((num_groups, 4))
    for a, b in zip(first, second, strict=True):
        totals_G4[int(a.group[1:])] += (a.num_accepted_tokens, a.rounds, b.num_accepted_tokens, b.rounds)
    weight_RG = rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=RESAMPLES)
    sums_R4 = weight_RG @ totals_G4
    gain_R = sums_R4[:, 0] / sums_R4[:, 1] - sums_R4[:, 2] / sums_R4[:, 3]
    scale = math.sqrt(num_groups / (num_groups - 1)) * t_quantile(num_groups - 1)
    return bool(np.quantile(gain_R, NormalDist().cdf(-scale)) > 0.0)


def apart(counts: Sequence[PromptCounts]) -> list[PromptCounts]:
    """Return the counts with every prompt as its own group."""
    return [replace(one, group=one.prompt_id) for one in counts]


def simulate(num_groups: int, sizes: Sequence[int], spread: float, studies: int) -> dict[str, float]:
    """Return the shares of studies that pass or cover, for one shape of study."""
    rng = np.random.default_rng(1000 * num_groups + len(sizes))
    noise = np.random.default_rng(1)
    truth = tau(equal_heads(rng, 5000, sizes, spread)[0])
    found = dict.fromkeys(("passed_groups", "passed_prompts", "passed_bootstrap", "covered_groups"), 0)
    for _ in range(studies):
        first, second = equal_heads(rng, num_groups, sizes, spread)
        found["passed_groups"] += passes(first, second)
        found["passed_prompts"] += passes(apart(first), apart(second))
        found["passed_bootstrap"] += bootstrap_passes(noise, first, second, num_groups)
        interval = tau_interval(first)
        found["covered_groups"] += interval is not None and interval[0] <= truth <= interval[1]
    return {name: round(number / studies, 4) for name, number in found.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate every shape of study, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000, help="studies of each shape")
    studies: int = parser.parse_args(argv).studies
    rows = []
    for num_groups in GROUPS:
        for shape, sizes in SIZES.items():
            for spread in (0.3, 1.0):
                row = {"groups": num_groups, "prompts": shape, "length_spread": spread}
                rows.append(row | simulate(num_groups, sizes, spread, studies))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result = {"nominal": 0.025, "standard_error": round(math.sqrt(0.025 * 0.975 / studies), 4), "rows": rows}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
