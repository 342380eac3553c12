#!/usr/bin/env python
"""Train a recipe's head under every objective, text and unroll, and compare what is accepted.

    python scripts/ablate.py recipes/retrain_head.yaml --out runs/ablation evaluate.prompts=96

Texts are ``corpus``, the sources' own responses, and ``self``, the trunk's responses to the same prompts. Unrolls are
``exact``, ``fastmtp`` and ``on_policy`` (exact, without what comes after a wrong draft). Everything else is the
recipe's, the same for all: steps, learning rate, held-out prompts. A seed is another order of the training text.

Acceptance is measured in decoding: greedily, and at temperature 1 with sampled drafts and rejection. Intervals of tau
are over groups of prompts, of which each brings the rounds of all seeds. Those of a gain are over groups and seeds; a
gain is marked as real where it survives Holm's correction over all gains. Heads and counts stay in the directory: a run
that was cut off goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mtp_inference import HeadDrafting, Request, SpeculativeDecoder
from mtp_inference.sampling import Sampling
from mtp_train.acceptance import Interval, PromptCounts, num_groups, paired, tau
from mtp_train.acceptance_intervals import holm, tau_difference, tau_interval
from mtp_train.data.records import Record
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.heads.attach import artifact_plan, build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs, gather_inputs, split_records
from mtp_train.machine import with_recorded_precision, with_resolved_precision
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import load_recipe
from mtp_train.run_dir import environment_facts, require_ours
from mtp_train.run_inputs import hash_run_inputs, require_run_inputs
from mtp_train.stages import claim_run, load_run_trunk, make_documents
from mtp_train.train.launch import make_accelerator
from mtp_train.training import train_stage
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.writing import write_json
from recorded_ablation import LEVEL, over_seeds, p_value, together

LOSSES = ("ce", "kl", "reverse_kl", "tv", "lk", "e2e_tv")
TEXTS = ("corpus", "self")
UNROLLS = ("exact", "fastmtp", "on_policy")
TEMPERATURES = (0.0, 1.0)
DECODED_TOGETHER = 32


@dataclass(frozen=True, order=True)
class Cell:
    """What is varied."""

    loss: str
    text: str
    unroll: str

    @property
    def name(self) -> str:
        """What its directory is called."""
        return f"{self.text}-{self.unroll}-{self.loss}"

    def recipe(self, recipe: Recipe, seed: int) -> Recipe:
        """Return the recipe of one run. The seed is the order of the text; what is held out is fixed before."""
        objective = replace(
            recipe.objective,
            loss=self.loss,
            unroll="fastmtp" if self.unroll == "fastmtp" else "exact",
            on_policy=self.unroll == "on_policy",
        )
        return replace(recipe, seed=seed, objective=objective)


Counts = dict[float, list[PromptCounts]]
"""By temperature, a prompt each."""


@dataclass(frozen=True)
class Bench:
    """What all cells share."""

    recipe: Recipe
    inputs: Inputs
    trunk: Trunk
    texts: dict[str, list[Document]]
    accelerator: Accelerator

    def train(self, cell: Cell, seed: int, directory: Path, progress: Progress) -> None:
        """Train the head of a cell, unless it is there."""
        if not (directory / "head").is_dir():
            recipe = cell.recipe(self.recipe, seed)
            train_stage(recipe, directory, self.inputs, self.trunk, self.texts[cell.text], self.accelerator, progress)

    def measure(self, directory: Path | None) -> Counts:
        """Decode the held-out prompts with a head, or with the one that training starts from."""
        plan = self.inputs.head_plan if directory is None else artifact_plan(load_artifact(directory / "head"))
        weight = self.trunk.lm_head_VD
        config = text_config_of(self.inputs.finetune)
        drafting = HeadDrafting(build_head(plan, config, dtype=weight.dtype).to(weight.device).eval(), plan.draft_vocab)
        return {temperature: self._decode(drafting, temperature) for temperature in TEMPERATURES}

    @torch.inference_mode()
    def _decode(self, drafting: HeadDrafting, temperature: float) -> list[PromptCounts]:
        decoder = SpeculativeDecoder(
            self.trunk,
            drafting,
            self.recipe.head.num_depths,
            self.inputs.eos_ids,
            draft_sampling="sampled",
            max_batch=DECODED_TOGETHER,
        )
        requests = [
            Request(
                prompt_ids=prompt.prompt_ids,
                max_new_tokens=self.recipe.evaluate.max_new_tokens,
                sampling=Sampling(temperature=temperature, seed=number),
            )
            for number, prompt in enumerate(self.inputs.held_out)
        ]
        results = decoder.generate(requests)
        pairs = zip(results, self.inputs.held_out, strict=True)
        return [result.counts(prompt.id, prompt.group) for result, prompt in pairs]


def open_bench(recipe: Recipe, directory: Path, progress: Progress) -> Bench:
    """Load the trunk and make both texts, of the same prompts."""
    recipe = with_recorded_precision(recipe, directory)
    require_ours(directory, recipe)
    require_run_inputs(recipe, directory, progress, anew=True)
    accelerator = make_accelerator()
    recipe = with_resolved_precision(recipe, accelerator.device)
    inputs = gather_inputs(recipe, accelerator.num_processes, progress)
    contents = hash_run_inputs(recipe, directory, progress)
    trunk = load_run_trunk(recipe, inputs, accelerator)
    # Heads and counts of two recipes, or of two trunks, must not be mixed.
    inputs = claim_run(recipe, directory, inputs, contents, accelerator, progress)
    own = make_documents(recipe, directory, inputs, trunk, accelerator, progress)
    records, _ = split_records(recipe)
    answered = {prompt.id for prompt in inputs.prompts}
    corpus, _ = tokenize_records(_of(records, answered), inputs.tokenizer, recipe.data.seq_len_tokens)
    return Bench(recipe, inputs, trunk, {"self": own, "corpus": corpus}, accelerator)


def _of(records: Sequence[Record], ids: set[str]) -> list[Record]:
    return [record for record in records if record.id in ids]


def stored(path: Path, measure: Callable[[], Counts]) -> Counts:
    """Read counts, or measure and write them; those of an earlier version, without groups, are measured again."""
    if not path.exists() or '"group"' not in path.read_text(encoding="utf-8"):
        found = {str(temperature): [asdict(count) for count in counts] for temperature, counts in measure().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    read = json.loads(path.read_text(encoding="utf-8"))
    return {
        float(temperature): [
            PromptCounts(**{**count, "accepted_per_pos": tuple(count["accepted_per_pos"])}) for count in counts
        ]
        for temperature, counts in read.items()
    }


def pooled(seeds: Sequence[Sequence[PromptCounts]]) -> list[PromptCounts]:
    """Add up what each prompt did under all seeds."""
    return [
        PromptCounts(
            prompt_id=same[0].prompt_id,
            rounds=sum(one.rounds for one in same),
            num_draft_tokens=sum(one.num_draft_tokens for one in same),
            accepted_per_pos=tuple(map(sum, zip(*(one.accepted_per_pos for one in same), strict=True))),
            new_tokens=sum(one.new_tokens for one in same),
            seconds=None,
            group=same[0].group,
        )
        for same in zip(*seeds, strict=True)
    ]


@dataclass(frozen=True)
class Row:
    """What a cell reached at one temperature."""

    cell: str
    temperature: float
    tau: float
    tau_ci95: Interval | None
    tau_of_seeds: list[float]
    gain: float
    """tau less that of the reference."""
    gain_ci95: Interval | None
    """Over groups and seeds; None with one of either."""
    gain_of_seeds: list[float]
    groups: int
    p_value: float | None
    """Two-sided, of no gain, before the correction; None for the reference itself."""
    survives: bool = False
    """Whether the gain is real at 5 % over all gains of the ablation (Holm)."""


def rows_of(found: dict[Cell, list[Counts]], reference: Cell) -> list[Row]:
    """Compare every cell with the reference, prompt by prompt and seed by seed."""
    rows = []
    for temperature in TEMPERATURES:
        base_seeds = [counts[temperature] for counts in found[reference]]
        base = pooled(base_seeds)
        for cell, seeds in found.items():
            own_seeds = [counts[temperature] for counts in seeds]
            own = pooled(own_seeds)
            gain_of_seeds = [tau(a) - tau(b) for a, b in zip(own_seeds, base_seeds, strict=True)]
            difference = tau_difference(own, paired(own, base))
            spread = None if difference.spread is None else together(difference.spread, over_seeds(gain_of_seeds))
            rows.append(
                Row(
                    cell=cell.name,
                    temperature=temperature,
                    tau=tau(own),
                    tau_ci95=tau_interval(own),
                    tau_of_seeds=[tau(one) for one in own_seeds],
                    gain=tau(own) - tau(base),
                    gain_ci95=None if spread is None else spread.interval(difference.value, LEVEL),
                    gain_of_seeds=gain_of_seeds,
                    groups=num_groups(own),
                    p_value=None if cell == reference else p_value(difference.value, spread),
                )
            )
    survives = holm([row.p_value for row in rows], LEVEL)
    return [replace(row, survives=fell) for row, fell in zip(rows, survives, strict=True)]


def table_of(rows: Sequence[Row], temperature: float, reference: Cell, graft: float) -> Table:
    """Show one temperature, the best first."""
    table = Table(title=f"temperature {temperature:g}; the head to begin with: tau {graft:.2f}")
    for heading in (
        "text",
        "unroll",
        "loss",
        "tau",
        "95 %",
        "seeds",
        f"gain over {reference.name}",
        "95 %",
        "seeds",
        "real",
    ):
        table.add_column(heading)
    for row in sorted((row for row in rows if row.temperature == temperature), key=lambda row: -row.tau):
        table.add_row(
            *row.cell.split("-"),
            f"{row.tau:.3f}",
            _span(row.tau_ci95, ".3f"),
            _span((min(row.tau_of_seeds), max(row.tau_of_seeds)), ".3f"),
            f"{row.gain:+.3f}",
            _span(row.gain_ci95, "+.3f"),
            _span((min(row.gain_of_seeds), max(row.gain_of_seeds)), "+.3f"),
            "yes" if row.survives else "no",
        )
    return table


def _span(interval: Interval | None, form: str) -> str:
    return "-" if interval is None else f"{interval[0]:{form}} to {interval[1]:{form}}"


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Cell]]:
    """Read the command line; the first loss, text and unroll together are the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    parser.add_argument("--out", type=Path, required=True, help="directory of heads, counts and ablation.json")
    parser.add_argument("--losses", default="kl,ce,reverse_kl,tv,lk,e2e_tv", help="the first is compared with")
    parser.add_argument("--texts", default="self,corpus", help="likewise")
    parser.add_argument("--unrolls", default="exact,fastmtp", help="likewise; also on_policy")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_intermixed_args(argv)
    axes = [("losses", LOSSES), ("texts", TEXTS), ("unrolls", UNROLLS)]
    chosen = {name: getattr(arguments, name).split(",") for name, _ in axes}
    for name, known in axes:
        if strange := [one for one in chosen[name] if one not in known]:
            parser.error(f"--{name}: {strange[0]!r}; expected some of {', '.join(known)}")
    if arguments.seeds < 1:
        parser.error(f"--seeds: {arguments.seeds}; expected 1 or more")
    cells = [Cell(*one) for one in itertools.product(chosen["losses"], chosen["texts"], chosen["unrolls"])]
    return arguments, cells


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, measure, compare, print."""
    arguments, cells = parse(argv)
    out: Path = arguments.out
    fixed = [f"run_dir={out}", "track.wandb=off", "data.regenerate.enabled=true"]
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *fixed])
    console = Console()
    found: dict[Cell, list[Counts]] = {cell: [] for cell in cells}
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bench = open_bench(recipe, out, progress)
        graft = stored(out / "start.json", lambda: bench.measure(None))
        for seed, cell in progress.track(list(itertools.product(range(arguments.seeds), cells)), description="cells"):
            directory = out / f"{cell.name}-{seed}"
            bench.train(cell, seed, directory, progress)
            found[cell].append(stored(directory / "counts.json", lambda at=directory: bench.measure(at)))
            done = "  ".join(f"T={t:g} tau {tau(counts):.3f}" for t, counts in found[cell][-1].items())
            console.print(f"{directory.name}: {done}")
    rows = rows_of(found, cells[0])
    for temperature in TEMPERATURES:
        console.print(table_of(rows, temperature, cells[0], tau(graft[temperature])))
    result = {
        "reference": cells[0].name,
        "seeds": arguments.seeds,
        "prompts": len(bench.inputs.held_out),
        "groups": {prompt.id: prompt.group for prompt in bench.inputs.held_out},
        # Of every cell, temperature and seed: rounds and accepted drafts by prompt, for other statistics later.
        "counts": {
            cell.name: {
                f"{temperature:g}": [
                    [(one.rounds, one.num_accepted_tokens) for one in counts[temperature]] for counts in seeds
                ]
                for temperature in TEMPERATURES
            }
            for cell, seeds in found.items()
        },
        "targets": {
            name: sum(int(document.loss_mask.sum()) for document in text) for name, text in bench.texts.items()
        },
        "start": {f"{temperature:g}": tau(counts) for temperature, counts in graft.items()},
        "rows": [asdict(row) for row in rows],
        "recipe": asdict(recipe),
        "environment": environment_facts(),
    }
    write_json(out / "ablation.json", result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
