#!/usr/bin/env python
"""Train a head with other trainers on the same answers, and compare acceptance.

    python -m venv runs/speculators && runs/speculators/bin/pip install speculators==0.9.0
    runs/speculators/bin/pip uninstall --yes torchvision torchaudio
    python -m venv runs/unsloth && runs/unsloth/bin/pip install unsloth==2026.10.9
    python scripts/peers.py recipes/retrain_head.yaml --environments runs --out runs/peers evaluate.prompts=96 \
        train.precision=fp32

    python scripts/peers.py retrain_head --environments runs --out runs/peers_eagle3 --seeds 1 --rates 0.0007 \
        model.trunk=TRUNK model.head_from=null head.kind=eagle3 head.init=random head.draft_vocab=8192 \
        data.sources.0.path=PROMPTS data.holdout=0.3 data.regenerate.max_prompts=400 \
        data.regenerate.max_new_tokens=160 train.precision=fp32 train.max_steps=100 train.tokens_per_step=2048 \
        train.micro_batch_sequences=1 'train.hidden_cache={}' 'evaluate.arms=[none, retrained]' evaluate.prompts=96 \
        evaluate.max_new_tokens=64

All train on the answers of the recipe, from the same graft, or a new head as each starts one, with equal steps of as
many tokens; the last tenth of the answers is left to speculators' validation. Our decoder judges, on the recipe's
held-out prompts: greedily, and at temperature 1 with sampled drafts. A cell's name is its trainer, its loss and the
learning rate. Trained heads and their counts stay in the directory, so the same command resumes an interrupted run.
``recorded_ablation.py peers.json`` compares the cells.

With ``--vllm VENV/bin/python`` vLLM judges too, greedily (``peers_vllm.json``); ``engines/programs/run_vllm.py`` says
what its environment needs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import mtp_train as mtp
from ablate import Bench, Counts, finish, open_bench, stored
from engines.launch import ENGINES, run_program
from engines.traces import cut, read_texts
from mtp_inference import HeadDrafting
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.export import write_checkpoint
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.writing import write_json
from mtp_train.heads.build import drafting_of
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.inputs import open_head_source, source_plan

PROGRAMS = Path(__file__).parent / "peers_maker"
TRAINED = 0.9
"""Share of the answers to train on."""
OURS = "ours"
WRITTEN = ("stitched", "draft")
"""What peers write: the verifier with the trained head, or a draft model."""


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


TRAINERS = {
    "mtp": (
        *((OURS, "kl"), (OURS, "ce"), ("unsloth", "kl"), ("unsloth", "ce")),
        *(("speculators", "ce"), ("speculators_before_norm", "ce")),
    ),
    "eagle3": ((OURS, "kl"), ("speculators", "kl")),
}
"""Trainers and losses by the kind of head; the first is the reference."""


@dataclass(frozen=True)
class PeersBench(Bench):
    """The bench of :mod:`ablate`, which also decodes with the head of a peer's checkpoint."""

    def drafting(self, directory: Path | None) -> HeadDrafting:
        """Return the head in a directory, or for None the initial head."""
        written = [] if directory is None else [one for one in WRITTEN if (directory / one).is_dir()]
        if directory is None or not written:
            return super().drafting(directory)
        trunk = self.run.inputs.finetune
        plan = source_plan(self.run.recipe, trunk, open_head_source(str(directory / written[0])))
        return drafting_of(plan, trunk, self.trunk.lm_head_VD)


@dataclass(frozen=True, kw_only=True)
class VllmBench(Bench):
    """The bench of :mod:`ablate`, with vLLM as its decoder."""

    python: str
    """The interpreter of vLLM's environment."""

    def measure(self, directory: Path | None) -> Counts:
        """Decode the held-out prompts greedily, up to their ends."""
        recipe, inputs = self.run.recipe, self.run.inputs
        work = (directory or self.run.directory.path) / "vllm"
        stitched = work.parent / "stitched"
        checkpoint = stitched if stitched.is_dir() else work / "model"
        if not checkpoint.is_dir():
            plan = inputs.head_plan if directory is None else load_artifact(directory / "head")
            write_checkpoint(inputs.finetune, plan.head, checkpoint, link="hard", progress=self.run.progress)
        prompts = [list(one.prompt_ids) for one in inputs.text.held_out]
        limit = recipe.evaluate.max_new_tokens
        job = {
            **{"checkpoint": str(checkpoint), "prompts": prompts, "max_new_tokens": limit, "draft": None},
            **{"depth": recipe.head.num_depths, "dtype": "bfloat16", "trust_remote_code": False},
        }
        texts = read_texts(run_program(ENGINES["vllm"], self.python, job, work), prompts)
        ended = (cut(one, limit, inputs.eos_ids).rounds[1:] for one in texts)
        return {"0": [[len(rounds), sum(one.num_accepted for one in rounds)] for rounds in ended]}


class Study:
    """All trainings on the answers of one run."""

    def __init__(self, recipe: Recipe, out: Path, environments: Path, progress: Progress) -> None:
        self.out, self.environments = out, environments
        bench = open_bench(recipe, out / "run", progress)
        self.bench = PeersBench(bench.run, bench.trunk, bench.texts)
        self.texts = bench.texts["self"]
        self.verifier = out / "verifier" if recipe.head.kind == "mtp" else bench.run.inputs.finetune.path
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
        train, head = self.bench.run.recipe.train, self.bench.run.recipe.head
        peer, _, states = cell.trainer.partition("_")
        own = {"unsloth": ("--loss", cell.loss), "speculators": ("--states", states or "after_norm")}
        flag, value = own[peer] if head.kind == "mtp" else ("--draft-vocab", head.draft_vocab)
        settings = {
            flag: value,
            "--lr": cell.rate,
            "--steps": train.max_steps,
            "--tokens": train.tokens_per_step,
            "--depth": head.num_depths,
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
    parser.add_argument("--vllm", help="interpreter of vLLM's environment, which judges too")
    options = parser.parse_intermixed_args(argv)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console, fixed = Console(), [f"run_dir={out / 'run'}", "track.wandb=off", "objective.loss=kl"]
    recipe = load_recipe(options.recipe, [*options.overrides, *fixed])
    with Progress(console=console, disable=True) as progress:
        study = Study(recipe, out, options.environments.absolute(), progress)
    cells = [
        Cell(*trainer, rate)
        for trainer, rate in itertools.product(TRAINERS[recipe.head.kind], options.rates.split(","))
    ]
    heads = {cell.name: [study.trained(cell, seed) for seed in range(options.seeds)] for cell in cells}
    costs = {name: [read_json(one / "cost.json") for one in of_cell] for name, of_cell in heads.items()}
    if options.vllm is not None:
        bench = VllmBench(study.bench.run, study.bench.trunk, study.bench.texts, python=options.vllm)
        judged(bench, heads, out, "_vllm", {})
    return judged(study.bench, heads, out, "", {"seeds": options.seeds, "costs": costs})


def judged(
    bench: Bench, heads: Mapping[str, Sequence[Path]], out: Path, judge: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure every head, unless it was, and return the record."""
    graft = stored(out / f"start{judge}.json", lambda: bench.measure(None))
    found = {
        name: [stored(one / f"counts{judge}.json", lambda at=one: bench.measure(at)) for one in of_cell]
        for name, of_cell in heads.items()
    }
    return finish(bench, graft, found, out / f"peers{judge}.json", more)


if __name__ == "__main__":
    main()
