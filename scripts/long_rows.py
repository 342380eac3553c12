#!/usr/bin/env python
"""Compare EAGLE-3 heads of as many losses, trained on short rows and on long ones: one command a stage.

    python scripts/real_model.py trunk                 # the model
    python scripts/long_rows.py text                   # pages of Python's own documentation
    python scripts/long_rows.py short                  # all positions of rows of 512 tokens
    python scripts/long_rows.py long                   # 1,024 sampled positions of rows of 8,192
    python scripts/long_rows.py offset                 # as short, the head at large positions
    python scripts/long_rows.py measure                # teacher-forced acceptance at three contexts

``offset`` adds a random number to the positions that the head sees, but for the first four tokens of a text: LongSpec's
anchor-offset indices (arXiv:2502.17421). The trunk computes its states at the true positions. All heads start from the
same random weights and take as many steps over the same pages, cut into rows of one length each. An interrupted
training goes on with the same command.

Shapes: K depths, N target rows, C contexts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pydoc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mtp_train
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.data.pack import PackedBatch, PackedSequence
from mtp_train.heads.build import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.losses.chunked import align_to_targets, to_starts
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import training
from mtp_train.runs.inputs import split_records
from mtp_train.runs.run_directory import environment_facts
from mtp_train.train.packed_rows import aligned_rows
from mtp_train.train.teacher_forced import target_figures
from mtp_train.trunk.load import load_trunk
from recorded_ablation import LEVEL, over_seeds

TEXT, MORE = "pages.jsonl", "more_pages.jsonl"
MODULES = (
    "ast asyncio asyncio.base_events builtins calendar codecs collections configparser ctypes decimal difflib doctest "
    "email.message enum ftplib functools http.client http.cookiejar imaplib importlib.metadata inspect io ipaddress "
    "itertools logging logging.handlers mailbox multiprocessing.pool optparse os pathlib pdb pickle random re signal "
    "smtplib socket socketserver sqlite3 ssl statistics subprocess tarfile threading turtle types typing unittest "
    "unittest.mock urllib.request weakref xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipfile"
)
PAGES, MORE_PAGES = 18, 8
SHORT, LONG, POSITIONS, LOSSES, ANCHORS = 512, 8192, 1024, 2048, 4
CONTEXTS, WINDOW, NUM_DEPTHS = (512, 2048, 7000), 256, 3
"""Acceptance at a context is that of drafts from the last positions before it."""
ROWS_OF_512 = [f"data.seq_len_tokens={SHORT}", f"train.tokens_per_step={LOSSES}"]
ROWS_OF_8192 = [f"data.seq_len_tokens={LONG}", f"train.tokens_per_step={LOSSES // POSITIONS * LONG}"]
ARMS = {"short": ROWS_OF_512, "long": [*ROWS_OF_8192, f"data.loss_positions={POSITIONS}"], "offset": ROWS_OF_512}
Batches = Callable[[int], list[PackedSequence]]


def text(options: argparse.Namespace) -> None:
    """Write the first 8,192 tokens of the help of each module that has as many; the last ones are measured on alone."""
    tokenizer: Any = load_tokenizer(open_location(str(options.model)))
    rows = []
    for name in MODULES.split():
        ids = tokenizer.encode(pydoc.plain(pydoc.render_doc(importlib.import_module(name))))
        if len(ids) >= LONG:
            rows.append(json.dumps({"text": tokenizer.decode(ids[: LONG - 1]), "group": name}) + "\n")
    for file, kept in ((TEXT, rows[:PAGES]), (MORE, rows[PAGES : PAGES + MORE_PAGES])):
        (options.out / file).write_text("".join(kept), encoding="utf-8")


def recipe_of(options: argparse.Namespace, arm: str) -> Recipe:
    recipe = {
        "run_dir": str(options.out / arm),
        "model": {"trunk": str(options.model)},
        "head": {"kind": "eagle3", "init": "random", "num_depths": NUM_DEPTHS, "draft_vocab": 8192},
        "data": {"sources": [{"path": str(options.out / TEXT)}], "group_field": "group", "holdout": 0.45},
        "train": {
            **{"max_steps": options.steps, "lr": 7e-4, "warmup_steps": options.steps // 20, "save_steps": 25},
            **{"tokens_per_step": 1, "hidden_cache": {"directory": str(options.out / "hidden")}},
        },
        "evaluate": {"arms": ["none", "retrained"], "prompts": 1},
        "gate": {"enabled": False},
        "export": {"enabled": False},
    }
    return load_recipe(recipe, ARMS[arm])


def train(options: argparse.Namespace) -> None:
    """Train the head of an arm."""
    if options.stage == "offset":
        training.global_batches = at_large_positions(training.global_batches)
    mtp_train.run(recipe_of(options, options.stage))


def at_large_positions(make: Callable[..., Batches]) -> Callable[..., Batches]:
    """Return ``make`` with a random offset added to the positions of every row."""

    def made(documents: Any, **settings: Any) -> Batches:
        batches = make(documents, **settings)

        def shifted(step: int) -> Iterator[PackedSequence]:
            generator = np.random.default_rng([settings["seed"], step])
            for row in batches(step):
                far_T = row.positions_T + generator.integers(LONG - SHORT)
                yield replace(row, positions_T=np.where(row.positions_T < ANCHORS, row.positions_T, far_T))

        return lambda step: [*shifted(step)]

    return made


@torch.inference_mode()
def measure(options: argparse.Namespace) -> None:
    """Measure the heads on each held-out page, and print the means over pages with their intervals."""
    checkpoint = open_location(str(options.model))
    tokenizer = load_tokenizer(checkpoint)
    trunk = load_trunk(checkpoint, dtype=torch.bfloat16)
    heads = {}
    for arm in ARMS:
        if (options.out / arm / "head").is_dir():
            plan = load_artifact(options.out / arm / "head")
            heads[arm] = build_head(plan, text_config_of(checkpoint), dtype=torch.float32).eval(), plan.draft_vocab
            trunk.show_to(heads[arm][0])
    trained, held_out = split_records(recipe_of(options, "short"))
    pages = {one.group: one.content.text for one in held_out}
    pages |= {one["group"]: one["text"] for one in map(json.loads, (options.out / MORE).open(encoding="utf-8"))}
    done = []
    for group, page in pages.items():
        tokens_1T = torch.tensor([tokenizer.encode(page)[: max(CONTEXTS) + NUM_DEPTHS + 1]])
        zeros_1T = torch.zeros_like(tokens_1T)
        batch = PackedBatch(tokens_1T, torch.arange(tokens_1T.shape[1])[None], zeros_1T, zeros_1T == 0)
        hidden_1TD = trunk.hidden(tokens_1T)
        found = {arm: accepted(trunk, *one, batch, hidden_1TD) for arm, one in heads.items()}
        done.append({"group": group, "taus": found})
    settings = {"steps": options.steps, "losses": LOSSES, "positions": POSITIONS, "trained_pages": len(trained)}
    facts = {name: environment_facts()[name] for name in ("versions", "hardware")}
    summary = {"settings": settings, "arms": summarised(done), "pages": done, "environment": facts}
    print(json.dumps(summary, indent=1))


def accepted(trunk: Any, head: Any, draft_vocab_R: Any, batch: PackedBatch, hidden_1TD: Any) -> list[float]:
    """Return the mean tokens a round of greedy decoding, drafts included, of the drafts before each context."""
    rows = aligned_rows(trunk, head, batch, hidden_1TD, NUM_DEPTHS, autocast=torch.bfloat16)
    wanted_1T = torch.zeros_like(batch.loss_mask_BT)
    for context in CONTEXTS:
        wanted_1T[:, context - WINDOW : context] = True
    rows = rows._replace(valid_KN=rows.valid_KN & align_to_targets([wanted_1T] * NUM_DEPTHS).flatten(1, 2))
    found = target_figures(rows, trunk, head, draft_vocab_R=draft_vocab_R)
    agreed_KN = to_starts(found.agreed_KN & rows.valid_KN).long().cumprod(0)
    return [1 + float(agreed_KN[:, context - WINDOW : context].sum(0).float().mean()) for context in CONTEXTS]


def summarised(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each arm the mean tau at each context, and that of its difference from ``short`` on the same page."""
    taus = {arm: np.array([row["taus"][arm] for row in done]) for arm in done[0]["taus"]}
    return {
        arm: {"tau": intervals(of_pages), "above_short": intervals(of_pages - taus["short"])}
        for arm, of_pages in taus.items()
    }


def intervals(values_PC: Any) -> list[list[float]]:
    """Return the mean over pages at each context, and its interval at 95 %."""
    means = [(float(of_context.mean()), over_seeds(of_context)) for of_context in values_PC.T]
    return [[round(one, 4) for one in (mean, *spread.interval(mean, LEVEL))] for mean, spread in means]


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("text", *ARMS, "measure"))
    parser.add_argument(
        "--model", type=Path, default=Path("runs/real_model/trunk"), help="default: runs/real_model/trunk"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/long_rows"), help="default: runs/long_rows")
    parser.add_argument("--steps", type=int, default=60, help="of 2,048 losses at depth 1; default: 60")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"text": text, "measure": measure}.get(options.stage, train)(options)


if __name__ == "__main__":
    main()
