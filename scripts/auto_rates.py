#!/usr/bin/env python
"""Measure the automatic learning rate and parts of it, for heads that start well trained, stale and new.

    python scripts/auto_rates.py --out runs/rates
    python scripts/auto_rates.py --out runs/rates-small --models small   # made by scripts/make_demo.py --size small

The starts, on the demo or on a directory with ``base``, ``finetune`` and ``prompts.jsonl``:

- ``trained``: a head that was trained out on the fine-tune, whose trunk a mild LoRA on other text then changed;
- ``halfway``: the base's head after a few steps on the fine-tune;
- ``stale``: the base's head on the fine-tune;
- ``new``: a head that starts as a copy of the last layer.

Every cell is a run of the recipe that ``mtp-train init`` writes, with another learning rate and without early stopping.
Finished cells are skipped, so that the same command resumes. Prints one line of JSON at the end: the teacher-forced
figures of the start, the best and the last head, and tau by decoding with the paired gain of the best.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

from mtp_train.checkpoints.demo import GROUP_FIELD, resolve
from mtp_train.checkpoints.locations import HEAD, RECIPE_FILE, open_location
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.sources import load_records
from mtp_train.data.tokenize import tokenize_records
from mtp_train.evaluation.results import REPORT_FILE, load_report
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.pipeline import run_recipe
from mtp_train.runs.resolve import override_texts, resolved_recipe
from mtp_train.runs.run_directory import environment_facts
from mtp_train.runs.write_recipe import settings_of
from mtp_train.train.log import read_metrics

STARTS = ("trained", "halfway", "stale", "new")
FACTORS = (1.0, 0.2, 0.04)
SHORT = {
    "data.regenerate.max_prompts": 320,
    "data.regenerate.max_new_tokens": 96,
    "data.seq_len_tokens": 256,
    "data.holdout": 0.2,
    "evaluate.prompts": 24,
    "evaluate.temperature": 0.0,
    "evaluate.max_new_tokens": 64,
    "evaluate.dense_tokens": 512,
    "train.tokens_per_step": 1024,
    "train.max_steps": 60,
    "train.precision": "fp32",
    "train.select": {"tokens": 4096, "share": 0.2},
    "train.hidden_cache": {},
    "export.enabled": False,
    "track.wandb": "off",
}
LORA_STEPS, LORA_LR, LORA_ROWS, LORA_TOKENS = 30, 1e-3, 4, 256


def tune_mildly(trunk: Path, text: Path, out: Path) -> None:
    """Write a LoRA adapter of ``trunk`` that was trained for a few steps on other text."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(open_location(str(trunk)), False)
    records = load_records(text, group_field=GROUP_FIELD, name=str(text))
    documents, _ = tokenize_records(records, tokenizer, LORA_TOKENS)
    whole = [document for document in documents if len(document.input_ids) == LORA_TOKENS]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(trunk, dtype=torch.float32),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=LORA_LR)
    for step in range(LORA_STEPS):
        rows = [whole[(step * LORA_ROWS + row) % len(whole)].input_ids for row in range(LORA_ROWS)]
        tokens = torch.stack([torch.tensor(row) for row in rows]).long()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{out}: loss {float(loss):.3f} after {LORA_STEPS} steps", flush=True)
    model.save_pretrained(out)


def run(out: Path, settings: dict[str, Any], values: dict[str, Any], console: Console) -> Path:
    """Run a recipe to its end; a refusal of the gate is no error."""
    recipe, choices = resolved_recipe({**settings, "run_dir": str(out)}, override_texts(SHORT | values))
    run_recipe(recipe, console, choices)
    return out


def cells(models: Path | None, out: Path, console: Console) -> Iterator[dict[str, Any]]:
    """Yield the figures of every cell."""
    base = "demo:base"
    trunk = "demo:finetune"
    data = "demo:prompts"
    code = resolve("demo:code")
    if models is not None:
        base, trunk, data, code = (str(models / name) for name in ("base", "finetune", "prompts.jsonl", "code.jsonl"))
    of_graft = settings_of("graft", trunk, base, "unused", [data])
    of_new = settings_of("graft", trunk, base, "unused", [data])
    of_new["head"] = {"init": "copy_last_layer"}
    # Twice: the second one starts from the first one's head.
    first = run(out / "first", of_graft, {"train.max_steps": 240}, console)
    again = {"model.head_from": str(first), "data.responses": str(first), "train.max_steps": 240}
    trained = run(out / "again", of_graft, again, console)
    few = {"train.max_steps": 12, "data.responses": str(first)}
    halfway = run(out / "halfway", of_graft, few, console)
    adapter = out / "adapter"
    if not adapter.is_dir():
        tune_mildly(Path(resolve(trunk)), Path(code), adapter)
    values: dict[str, dict[str, Any]] = {
        "trained": {"model.head_from": str(trained), "model.adapter": str(adapter)},
        "halfway": {"model.head_from": str(halfway), "data.responses": str(first)},
        "stale": {"data.responses": str(first)},
        "new": {"data.responses": str(first)},
    }
    for start in STARTS:
        settings = of_new if start == "new" else of_graft
        rule = load_recipe(first / RECIPE_FILE).train.lr
        for factor in FACTORS:
            directory = run(
                out / f"{start}-{factor:g}", settings, {**values[start], "train.lr": rule * factor}, console
            )
            if start == "trained":
                values[start]["data.responses"] = str(out / f"{start}-{FACTORS[0]:g}")
            yield figures(start, factor, directory)


def figures(start: str, factor: float, run_dir: Path) -> dict[str, Any]:
    """Return the figures of a finished cell."""
    recipe, report = load_recipe(run_dir / RECIPE_FILE), load_report(run_dir / REPORT_FILE)
    measured = [line for line in read_metrics(run_dir) if "held_out_tau" in line]
    gate, graft = report.gate, report.arms["graft"]
    return {
        "start": start,
        "factor": factor,
        "lr": recipe.train.lr,
        "steps": recipe.train.max_steps,
        "tokens_per_step": recipe.train.tokens_per_step,
        "overlap": measured[0]["held_out_overlap_depth_1"],
        "held_out": [(one["step"], one["held_out_tau"], one["held_out_tau_sampled"]) for one in measured],
        "selected": json.loads((run_dir / HEAD / "head_config.json").read_text())["notes"]["selected"]["step"],
        "graft_tau": graft.tau,
        "tau": report.arms["retrained"].tau,
        "gain_ci95": None if gate is None else gate.delta_tau_ci95,
    }


def main() -> None:
    """Measure every cell, and print the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and of rates.json")
    parser.add_argument("--models", type=Path, help="directory of another pair of models; the demo's by default")
    arguments = parser.parse_args()
    console, found = Console(), []
    for cell in cells(arguments.models, arguments.out, console):
        found.append(cell)
        console.print({name: value for name, value in cell.items() if name != "held_out"})
    record = {"cells": found, "settings": SHORT, "environment": environment_facts()}
    write_json(arguments.out / "rates.json", record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
