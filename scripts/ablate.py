#!/usr/bin/env python
"""Train a recipe's head with every loss, training text and unroll, and compare acceptance.

    python scripts/ablate.py recipes/retrain_head.yaml --out runs/ablation evaluate.prompts=96

Texts are ``corpus``, the responses in the sources, and ``self``, the trunk's responses to the same prompts. Unrolls are
``exact`` and ``fastmtp``. All other settings, such as steps, learning rate and held-out prompts, come from the recipe
and are equal for all runs. The seed determines the order of the training text.

Acceptance is measured by decoding: greedily, and at temperature 1 with sampled drafts and rejection sampling.
``recorded_ablation.py`` compares the cells. Heads and counts stay in the directory, so the same command resumes an
interrupted run.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from mtp_inference import HeadDrafting, Request, SpeculativeDecoder
from mtp_inference.sampling.distributions import Sampling
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.records import has_response
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.heads.build import drafting_of
from mtp_train.losses.catalogue import DEFAULT_LOSS, loss_names
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.inputs import split_records
from mtp_train.runs.regeneration import data_stage
from mtp_train.runs.run import Run, join_processes
from mtp_train.runs.run_directory import RunDirectory, environment_facts
from mtp_train.runs.training import train_stage
from mtp_train.runs.trunks import decoding_trunk
from mtp_train.trunk.load import Trunk
from recorded_ablation import contrasts, tables

TEXTS, UNROLLS = ("self", "corpus"), ("exact", "fastmtp")
TEMPERATURES = (0.0, 1.0)
DECODED_TOGETHER = 32


@dataclass(frozen=True, order=True)
class Cell:
    """One combination of loss, text and unroll."""

    loss: str
    text: str
    unroll: str

    @property
    def name(self) -> str:
        """Stem of the names of its directories."""
        return f"{self.text}-{self.unroll}-{self.loss}"

    def recipe(self, recipe: Recipe, seed: int) -> Recipe:
        """Return the recipe of one run. The seed changes the order of the text, not the held-out prompts."""
        return recipe.replaced(
            {
                "seed": seed,
                "objective.loss": self.loss,
                "objective.unroll": self.unroll,
            }
        )


Counts = dict[str, list[list[int]]]
"""Rounds and accepted drafts of every prompt, by temperature."""


@dataclass(frozen=True)
class Bench:
    """The recipe, trunk and texts that all cells share."""

    run: Run
    trunk: Trunk
    texts: dict[str, list[Document]]
    temperatures: Sequence[float] = TEMPERATURES

    def train(self, recipe: Recipe, text: Sequence[Document], directory: Path) -> None:
        """Train the head of a cell, unless the directory holds it already."""
        if not (directory / "head").is_dir():
            train_stage(replace(self.run, recipe=recipe, directory=RunDirectory(directory)), text)

    def drafting(self, directory: Path | None) -> HeadDrafting:
        """Return the head in a directory, or for None the initial head."""
        plan = self.run.inputs.head_plan if directory is None else load_artifact(directory / "head")
        return drafting_of(plan, self.run.inputs.finetune, self.trunk.lm_head_VD)

    def measure(self, directory: Path | None) -> Counts:
        """Decode the held-out prompts with the head in a directory, or for None with the initial head."""
        drafting = self.drafting(directory)
        return {f"{temperature:g}": self._decode(drafting, temperature) for temperature in self.temperatures}

    @torch.inference_mode()
    def _decode(self, drafting: HeadDrafting, temperature: float) -> list[list[int]]:
        decoder = SpeculativeDecoder(
            self.trunk,
            drafting,
            self.run.recipe.head.num_depths,
            self.run.inputs.eos_ids,
            draft_sampling="sampled",
            max_batch=DECODED_TOGETHER,
        )
        requests = [
            Request(
                prompt_ids=prompt.prompt_ids,
                max_new_tokens=self.run.recipe.evaluate.max_new_tokens,
                sampling=Sampling(temperature=temperature, seed=number),
            )
            for number, prompt in enumerate(self.run.inputs.text.held_out)
        ]
        return [[one.rounds, one.num_accepted_tokens] for one in decoder.generate(requests)]


def open_bench(recipe: Recipe, directory: Path, progress: Progress) -> Bench:
    """Load the trunk and build both texts from the same prompts."""
    run_directory = RunDirectory(directory)
    # One directory must not mix heads and counts of two recipes or two trunks.
    run_directory.require_ours(recipe)
    accelerator, recipe = join_processes(recipe, run_directory)
    run = Run.begin(recipe, run_directory, accelerator, progress)
    decoding_trunk(run)
    run.claim()
    own = data_stage(run)
    records, _ = split_records(recipe)
    answered = {prompt.id for prompt in run.inputs.text.prompts}
    kept = [record for record in records if record.id in answered and has_response(record.content)]
    corpus = tokenize_records(kept, run.inputs.tokenizer, recipe.data.seq_len_tokens)[0] if kept else []
    return Bench(run, decoding_trunk(run), {"self": own, "corpus": corpus})


def stored(path: Path, measure: Callable[[], Counts]) -> Counts:
    """Return the counts in a file, or measure and write them."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, measure())
    return read_json(path)


def finish(
    bench: Bench, graft: Counts, found: Mapping[str, Sequence[Counts]], path: Path, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare cells with the first one, print the tables, and write and return the record.

    Args:
        found: The counts of each seed, by the names of the cells.
        more: Further fields of the record.
    """
    held_out = bench.run.inputs.text.held_out
    result: dict[str, Any] = {
        "reference": next(iter(found)),
        "prompts": len(held_out),
        "groups": {prompt.id: prompt.group for prompt in held_out},
        # Rounds and accepted drafts by cell, temperature, seed and prompt: raw data for other statistics.
        "counts": {
            name: {temperature: [counts[temperature] for counts in seeds] for temperature in graft}
            for name, seeds in found.items()
        },
        "start": {temperature: tau(counts) for temperature, counts in graft.items()},
        "recipe": bench.run.recipe.model_dump(mode="json"),
        "environment": environment_facts(),
        **more,
    }
    result["contrasts"] = contrasts(result)
    print(tables(result, result["contrasts"]))
    write_json(path, result)
    print(json.dumps(result))
    return result


def tau(counts: Sequence[Sequence[int]]) -> float:
    """Return the mean tokens of a round from the rounds and accepted drafts of each prompt."""
    rounds, accepted = map(sum, zip(*counts, strict=True))
    return 1.0 + accepted / rounds


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Cell]]:
    """Parse the command line. Other losses, texts and unrolls are compared with the first of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a recipe field")
    parser.add_argument("--out", type=Path, required=True, help="directory of heads, counts and ablation.json")
    default_first = sorted(loss_names(), key=lambda name: name != DEFAULT_LOSS)
    parser.add_argument("--losses", default=",".join(default_first), help="the first is the reference")
    parser.add_argument("--texts", default="self,corpus", help="the first is the reference")
    parser.add_argument("--unrolls", default="exact,fastmtp", help="the first is the reference")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_intermixed_args(argv)
    axes = {"losses": loss_names(), "texts": TEXTS, "unrolls": UNROLLS}
    chosen = {name: getattr(arguments, name).split(",") for name in axes}
    for name, known in axes.items():
        if strange := [one for one in chosen[name] if one not in known]:
            parser.error(f"--{name}: {strange[0]!r}; expected some of {', '.join(known)}")
    return arguments, [Cell(*one) for one in itertools.product(*chosen.values())]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and measure all cells, print the tables, and return the result."""
    arguments, cells = parse(argv)
    out: Path = arguments.out
    fixed = [f"run_dir={out}", "track.wandb=off"]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *fixed])
    console = Console()
    found: dict[str, list[Counts]] = {cell.name: [] for cell in cells}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bench = open_bench(recipe, out, progress)
        graft = stored(out / "start.json", lambda: bench.measure(None))
        for seed, cell in progress.track(list(itertools.product(range(arguments.seeds), cells)), description="cells"):
            directory = out / f"{cell.name}-{seed}"
            bench.train(cell.recipe(bench.run.recipe, seed), bench.texts[cell.text], directory)
            found[cell.name].append(stored(directory / "counts.json", lambda at=directory: bench.measure(at)))
            done = "  ".join(f"T={t} tau {tau(counts):.3f}" for t, counts in found[cell.name][-1].items())
            console.print(f"{directory.name}: {done}")
    targets = {name: sum(int(document.loss_mask.sum()) for document in text) for name, text in bench.texts.items()}
    return finish(bench, graft, found, out / "ablation.json", {"seeds": arguments.seeds, "targets": targets})


if __name__ == "__main__":
    main()
