#!/usr/bin/env python
"""Train a native head with other trainers on the same answers, and compare acceptance.

    python -m venv runs/speculators && runs/speculators/bin/pip install speculators==0.9.0
    runs/speculators/bin/pip uninstall --yes torchvision torchaudio
    python -m venv runs/unsloth && runs/unsloth/bin/pip install unsloth==2026.10.9
    python scripts/peers.py recipes/retrain_head.yaml --environments runs --out runs/peers evaluate.prompts=96 \
        train.precision=fp32

All train on the answers of the recipe, from the same graft, with equal steps of as many tokens; the last
tenth of the answers is left to speculators' validation. Our decoder judges, on the recipe's held-out prompts: greedily,
and at temperature 1 with sampled drafts. A cell's name is its trainer, its loss and the learning rate. Trained heads
and their counts stay in the directory, so the same command resumes an interrupted run.
``recorded_ablation.py peers.json`` compares the cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import mtp_train as mtp
from ablate import Bench, Counts, finish, open_bench, stored, tau
from mtp_inference import HeadDrafting
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.writing import write_json
from mtp_train.heads.build import drafting_of, graft_plan
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe

PROGRAMS = Path(__file__).parent / "peers_maker"
TRAINED = 0.9
"""Share of the answers to train on."""
OURS = "ours"


@dataclass(frozen=True)
class Cell:
    """A training."""

    trainer: str
    """Ours, or a peer, and the states that the head is trained on where they are not those after the final norm."""
    loss: str
    rate: str

    @property
    def name(self) -> str:
        return f"{self.trainer}-{self.loss}-{self.rate}"


TRAINERS = (
    *((OURS, "kl"), (OURS, "ce"), ("unsloth", "kl"), ("unsloth", "ce")),
    *(("speculators", "ce"), ("speculators_before_norm", "ce")),
)
"""Trainers and losses; the first is the reference."""


@dataclass(frozen=True)
class PeersBench(Bench):
    """The bench of :mod:`ablate`, which also decodes with the head of a peer's checkpoint."""

    def drafting(self, directory: Path | None) -> HeadDrafting:
        """Return the head in a directory, or for None the initial head."""
        if directory is None or not (directory / "stitched").is_dir():
            return super().drafting(directory)
        plan = graft_plan(self.run.inputs.finetune, open_location(str(directory / "stitched")), "auto")
        return drafting_of(plan, self.run.inputs.finetune, self.trunk.lm_head_VD)


class Study:
    """All trainings on the answers of one run."""

    def __init__(self, recipe: Recipe, out: Path, environments: Path, progress: Progress) -> None:
        self.out, self.environments = out, environments
        bench = open_bench(recipe, out / "run", progress)
        self.bench = PeersBench(bench.run, bench.trunk, bench.texts)
        self.texts = bench.texts["self"]
        self.verifier = out / "verifier"
        if not self.verifier.is_dir():
            mtp.graft(str(recipe.model.trunk), str(recipe.model.head_from), self.verifier)
        rows = [{"input_ids": one.input_ids.tolist(), "loss_mask": one.loss_mask.tolist()} for one in self.texts]
        (out / "texts.json").write_text(json.dumps(rows), encoding="utf-8")

    def trained(self, cell: Cell, seed: int) -> Path:
        """Return the directory of a cell's head, which is trained unless it was."""
        directory = self.out / f"{cell.name}-{seed}"
        if not (directory / "cost.json").exists():
            train = self._ours if cell.trainer == OURS else self._peer
            cost = train(cell, seed, directory)
            write_json(directory / "cost.json", cost)
        return directory

    def _ours(self, cell: Cell, seed: int, directory: Path) -> dict[str, Any]:
        recipe = self.bench.run.recipe
        changes = {"seed": seed, "objective.loss": cell.loss, "train.lr": float(cell.rate)}
        started = time.process_time()
        self.bench.train(recipe.replaced(changes), self.texts[: int(len(self.texts) * TRAINED)], directory)
        return {"cpu_seconds": round(time.process_time() - started, 1)}

    def _peer(self, cell: Cell, seed: int, directory: Path) -> dict[str, Any]:
        train = self.bench.run.recipe.train
        peer, _, states = cell.trainer.partition("_")
        own = {"unsloth": ("--loss", cell.loss), "speculators": ("--states", states or "after_norm")}
        flag, value = own[peer]
        settings = {
            flag: value,
            "--lr": cell.rate,
            "--steps": train.max_steps,
            "--tokens": train.tokens_per_step,
            "--depth": self.bench.run.recipe.head.num_depths,
            "--share": TRAINED,
            "--seed": seed,
        }
        flags = [str(one) for pair in settings.items() for one in pair]
        places = [self.out / "texts.json", self.verifier, directory]
        python, program = self.environments / peer / "bin" / "python", PROGRAMS / f"train_{peer}.py"
        printed = subprocess.run([python, program, *places, *flags], check=True, stdout=subprocess.PIPE, text=True)
        return dict(json.loads(printed.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and measure every cell, print the tables, and return the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a recipe field")
    parser.add_argument("--environments", type=Path, required=True, help="directory of the peers' environments")
    parser.add_argument("--out", type=Path, required=True, help="directory of heads, counts and peers.json")
    # speculators' tutorial has 1e-4, its trainer 1e-3 by default, the recipe 6e-3.
    parser.add_argument("--rates", default="0.006", help="learning rates, the first is the reference; default: 0.006")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    options = parser.parse_intermixed_args(argv)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console, fixed = Console(), [f"run_dir={out / 'run'}", "track.wandb=off", "objective.loss=kl"]
    recipe = load_recipe(options.recipe, [*options.overrides, *fixed])
    with Progress(console=console, disable=True) as progress:
        study = Study(recipe, out, options.environments.absolute(), progress)
    cells = [Cell(*trainer, rate) for trainer, rate in itertools.product(TRAINERS, options.rates.split(","))]
    found: dict[str, list[Counts]] = {cell.name: [] for cell in cells}
    costs: dict[str, list[Any]] = {cell.name: [] for cell in cells}
    graft = stored(study.out / "start.json", lambda: study.bench.measure(None))
    for seed, cell in itertools.product(range(options.seeds), cells):
        directory = study.trained(cell, seed)
        found[cell.name].append(stored(directory / "counts.json", lambda at=directory: study.bench.measure(at)))
        costs[cell.name].append(read_json(directory / "cost.json"))
        taus = "  ".join(f"T={one} tau {tau(counts):.3f}" for one, counts in found[cell.name][-1].items())
        console.print(f"{directory.name}: {taus}  {costs[cell.name][-1]['cpu_seconds']} s")
    return finish(study.bench, graft, found, out / "peers.json", {"seeds": options.seeds, "costs": costs})


if __name__ == "__main__":
    main()
