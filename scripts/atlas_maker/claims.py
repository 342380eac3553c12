"""Judge the records of the atlas: what retraining gained, what changes it, which score picks the better head.

A gain of one fine-tune has an interval over groups of prompts. A claim is a mean over fine-tunes, whose interval is
over fine-tunes: it covers seeds and prompts too, since both change from one fine-tune to the next. Holm's correction is
over all claims.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ablate import tau
from atlas_maker.cells import (
    BEFORE_RL,
    CONTROL,
    CORPUS,
    FEW,
    FIFTH,
    MANY,
    NAMES,
    OWN,
    REFERENCE,
    TWENTY_FIFTH,
    Cell,
)
from mtp_train.acceptance.intervals import Difference, holm, tau_difference
from mtp_train.checkpoints.files import read_json
from mtp_train.runs.resolve import GOOD_OVERLAP
from mtp_train.train.select import score_of
from recorded_ablation import over_seeds as spread_of_mean, p_value, prompt_counts

GRAFT = "graft"
LEVEL = 0.05
TEMPERATURES = ("0", "0.7")
CONTRASTS: dict[str, tuple[Cell, Cell | None]] = {
    "retrained - graft": (REFERENCE, None),
    "a fifth of the rate - graft": (FIFTH, None),
    "a fifth of the rate - the rate": (FIFTH, REFERENCE),
    "a 25th of the rate - the rate": (TWENTY_FIFTH, REFERENCE),
    "ce - kl": (Cell(loss="ce"), REFERENCE),
    "e2e_tv - kl": (Cell(loss="e2e_tv"), REFERENCE),
    "corpus - own answers": (Cell(text=CORPUS), REFERENCE),
    "the base's answers - own answers": (Cell(text=CONTROL), REFERENCE),
    f"{FEW} answers - {REFERENCE.answers}": (Cell(answers=FEW), REFERENCE),
    f"{MANY} answers - {REFERENCE.answers}": (Cell(answers=MANY), REFERENCE),
}
"""Two cells that differ in one thing, the second None for the graft."""
SCORES = ("held_out_tau", "held_out_tau_sampled", "held_out_overlap_depth_1", "held_out_agreement_depth_1")
SELECTED = "mean of both"
"""The score of ``train.select``."""
Record = Mapping[str, Any]


def read_records(directory: Path) -> dict[str, Record]:
    """Return the records by fine-tune, in the order of the design."""
    paths = {name: directory / f"{name}.json" for name in NAMES}
    return {name: read_json(path) for name, path in paths.items() if path.exists()}


def measured(record: Record, cell: Cell | None) -> Record | None:
    """Return what was measured of a cell, or for None of the graft; None where it has not been run."""
    found: Record | None = record[GRAFT] if cell is None else record.get("cells", {}).get(cell.name)
    return found


def gain(record: Record, first: Cell, second: Cell | None, temperature: str) -> Difference | None:
    """Return the gain in tau of one cell over another of a fine-tune; None where one of them has not been run."""
    one, other = measured(record, first), measured(record, second)
    return None if one is None or other is None else difference(record, one, other, temperature)


def difference(record: Record, first: Record, second: Record, temperature: str) -> Difference:
    """Return the gain in tau of one measured head of a fine-tune over another."""
    counts = (found["counts"][temperature] for found in (first, second))
    return tau_difference(*(prompt_counts(one, enumerate(record["groups"])) for one in counts))


def claims(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return the mean gain of each contrast over fine-tunes, its interval, and whether it survives the correction."""
    found = []
    for (name, (first, second)), temperature in itertools.product(CONTRASTS.items(), TEMPERATURES):
        gains = {one: gain(record, first, second, temperature) for one, record in records.items()}
        values = {one: difference.value for one, difference in gains.items() if difference is not None}
        row: dict[str, Any] = {"contrast": name, "temperature": temperature, "gains": values}
        if len(values) > 2:
            mean, spread = float(np.mean(list(values.values()))), spread_of_mean([*values.values()])
            row |= {"mean": mean, "ci95": spread.interval(mean, LEVEL), "p_value": p_value(mean, spread)}
        found.append(row)
    survives = holm([row.get("p_value") for row in found], LEVEL)
    return [{**row, "survives": one} for row, one in zip(found, survives, strict=True)]


def before_rl(records: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """Yield what heads of the base accept before and after its entropy changed, without further training.

    Beside its own head, and one that was trained for the changed trunk by KL.
    """
    known = {name: record for name, record in records.items() if "before_rl" in record}
    for (name, record), temperature in itertools.product(known.items(), TEMPERATURES):
        trained = {one.loss: record["before_rl"][one.name] for one in BEFORE_RL}
        heads = {GRAFT: record[GRAFT], **trained, "after": record["cells"][REFERENCE.name]}
        others = [head for head in heads if head != REFERENCE.loss]
        pairs = {f"{one} - kl": difference(record, heads[one], trained["kl"], temperature) for one in others}
        yield {
            "finetune": name,
            "temperature": temperature,
            "tau": {head: tau(found["counts"][temperature]) for head, found in heads.items()},
            "differences": {pair: [one.value, *(one.ci95 or ())] for pair, one in pairs.items()},
        }


def over_seeds(records: Mapping[str, Record]) -> dict[str, list[float]]:
    """Return greedy tau of each seed of the reference, of the fine-tunes that have several."""
    seeds = [Cell(seed=seed) for seed in range(3)]
    found = {name: [measured(record, cell) for cell in seeds] for name, record in records.items()}
    return {
        name: [tau(one["counts"]["0"]) for one in of_name if one] for name, of_name in found.items() if all(of_name)
    }


def decoded(found: Record) -> float:
    """Return what users get: the mean of tau greedily and sampled."""
    return float(np.mean([tau(found["counts"][temperature]) for temperature in TEMPERATURES]))


def score(found: Record, text: str, name: str) -> float:
    figures = found["scores"][text]
    return float(score_of(figures) if name == SELECTED else figures[name])


def selection(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return how well each score on each text tells which of two heads of one fine-tune decodes better.

    Pairs whose decoded tau differs by less than 0.02 are left out. The correlation is over all heads, each fine-tune's
    mean taken off.
    """
    heads = [[record[GRAFT], *record.get("cells", {}).values()] for record in records.values()]
    found = []
    for text, name in itertools.product((OWN, CORPUS), (*SCORES, SELECTED)):
        right, total, scored, taus = 0, 0, list[float](), list[float]()
        for of_name in heads:
            of_scores = np.array([score(one, text, name) for one in of_name])
            of_taus = np.array([decoded(one) for one in of_name])
            scored += list(of_scores - of_scores.mean())
            taus += list(of_taus - of_taus.mean())
            for one, other in itertools.combinations(range(len(of_name)), 2):
                apart = of_taus[one] - of_taus[other]
                if abs(apart) >= 0.02:
                    total += 1
                    right += bool((of_scores[one] - of_scores[other]) * apart > 0)
        correlation = float(np.corrcoef(scored, taus)[0, 1])
        found.append({"text": text, "score": name, "right": right, "pairs": total, "correlation": correlation})
    return found


def outcomes(records: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """Yield what is known of each fine-tune before and after its reference cell was trained."""
    for name, record in records.items():
        row: dict[str, Any] = {
            "finetune": name,
            "kl": record["moved"]["kl"],
            "same_top_token": record["moved"]["same_top_token"],
            "overlap": record[GRAFT]["scores"][OWN]["held_out_overlap_depth_1"],
            "probe": record.get("probe", {}).get("verdict"),
            "graft": [tau(record[GRAFT]["counts"][temperature]) for temperature in TEMPERATURES],
        }
        for key, cell in (("retrained", REFERENCE), ("fifth", FIFTH)):
            if (found := measured(record, cell)) is not None:
                gains = [gain(record, cell, None, temperature) for temperature in TEMPERATURES]
                row[key] = {
                    "tau": [tau(found["counts"][temperature]) for temperature in TEMPERATURES],
                    "ci95": [one and one.ci95 for one in gains],
                    "gate": found["gate"],
                }
        # What `train.lr: auto` takes, by the overlap before the first step.
        row["auto"] = "fifth" if row["overlap"] >= GOOD_OVERLAP else "retrained"
        yield row


def pays(row: Mapping[str, Any]) -> bool:
    """Return whether the gate passed the head of the rate that ``auto`` takes."""
    return bool(row[row["auto"]]["gate"] == "passed")


def rule(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit "retrain below this overlap" on every second fine-tune, and judge it and the probe on the others."""
    known = [row for row in rows if row["auto"] in row]
    fitted, judged = known[::2], known[1::2]
    limits = sorted(row["overlap"] for row in known)

    def errors(of_rows: Sequence[Mapping[str, Any]], says: Callable[[Mapping[str, Any]], bool]) -> int:
        return sum(says(row) != pays(row) for row in of_rows)

    # Of equal limits the largest: a training that does not pay is refused by the gate.
    limit = min([*limits, 1.01], key=lambda one: (errors(fitted, lambda row: row["overlap"] < one), -one))
    return {
        "limit": limit,
        "fitted": [len(fitted), errors(fitted, lambda row: row["overlap"] < limit)],
        "judged": [len(judged), errors(judged, lambda row: row["overlap"] < limit)],
        "probe": [len(known), errors(known, lambda row: row["probe"] in ("retrain", "fault"))],
    }


def judged(records: Mapping[str, Record]) -> dict[str, Any]:
    """Return everything that the page says, as JSON."""
    rows = list(outcomes(records))
    return {
        "outcomes": rows,
        "claims": claims(records),
        "before_rl": list(before_rl(records)),
        "seeds": over_seeds(records),
        "selection": selection(records),
        "rule": rule(rows),
        "reference": asdict(REFERENCE),
        "cells": sum(len(record.get("cells", {})) for record in records.values()),
        "train_cpu_seconds": sum(
            one["train_cpu_seconds"] for record in records.values() for one in record.get("cells", {}).values()
        ),
    }
