#!/usr/bin/env python
"""Train a head on llama.cpp's own hidden states of a GGUF trunk, and compare it with one for the dequantised trunk.

    python scripts/gguf_states.py recipes/retrain_head.yaml --server llama-server --trunk tuned.gguf --work DIR \
        --suite held-out.jsonl --title NAME --out RECORD.json \
        model.head_from=wide/base data.sources.0.path=prompts.jsonl

The files are those of ``gguf_acceptance.py``. Both heads start from the same weights, and have the same text, steps,
order, learning rate and loss: only the states that head and loss read differ. llama.cpp quantises activations as well
as weights, and the dequantised trunk rounds its weights to bf16. Acceptance is by llama-server's counters on held-out
prompts. The interval of the difference is over groups of prompts, seeds pooled in each group, and over seeds, as in
``recorded_ablation.py``. Heads and GGUF files stay in DIR, so the same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import mtp_train as mtp
from ablate import Cell, open_bench
from gguf_acceptance import PLAIN, URL, arm_of, ask_arms, make_parser, serving, settings_of, write_record
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.locations import EXPORT, HEAD
from mtp_train.data.tokenize import Document
from mtp_train.evaluation.statistics import Served
from mtp_train.losses.catalogue import DEFAULT_LOSS
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.export import write_export
from mtp_train.upstream.transformers_private import replacing
from recorded_ablation import contrasts

STALE, ENGINE, DEQUANTISED = "stale", "llama.cpp", "dequantised"
"""The head as it was, and those trained on the states of each source."""
CELL = Cell(DEFAULT_LOSS, "self", "exact")


def known_states(documents: Sequence[Document], states: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what looks up the states of whole documents by their tokens, in the place of :meth:`Trunk.hidden`."""
    by_tokens = {_key(one.input_ids): state_TD for one, state_TD in zip(documents, states, strict=True)}
    return lambda tokens_BT: pad_sequence([by_tokens[_key(row)] for row in tokens_BT.numpy()], batch_first=True)


def _key(tokens_T: Any) -> bytes:
    # Rows are padded with token 0, which may end a document as well.
    return np.trim_zeros(tokens_T.astype(np.int64), "b").tobytes()


def engine_states(file: Path, documents: Sequence[Document], options: argparse.Namespace) -> list[Tensor]:
    """Return llama.cpp's states after the final norm of every document, (T, D), each computed in one batch."""
    longest = str(max(len(document.input_ids) for document in documents))
    flags = ("--embeddings", "--pooling", "none", "-c", longest, "-b", longest, "-ub", longest)
    states = []
    with serving(file, options, *flags):
        for document in documents:
            told = httpx.post(f"{URL}/embeddings", json={"input": document.input_ids.tolist()}, timeout=None)
            state_TD = torch.tensor(told.json()[0]["embedding"])
            if len(state_TD) != len(document.input_ids) or not state_TD.isfinite().all():
                raise SystemExit(f"{document.id}: {tuple(state_TD.shape)}; expected a finite state for each token")
            states.append(state_TD)
    return states


def train_heads(recipe: Recipe, options: argparse.Namespace) -> dict[str, Path]:
    """Put a head of every source and seed into the trunk's file; return the files."""
    files = {STALE: options.work / f"{STALE}.gguf"}
    with Progress(disable=True) as progress:
        bench = open_bench(recipe, options.work / "run", progress)
        documents, trunk = bench.texts[CELL.text], bench.run.inputs.finetune
        # llama.cpp refuses a file without the head that it declares.
        if not files[STALE].exists():
            mtp.graft(options.trunk, str(recipe.model.head_from), files[STALE], head="f32")
        with torch.inference_mode():
            own = [bench.trunk.hidden(torch.from_numpy(one.input_ids).long()[None])[0] for one in documents]
        states = {DEQUANTISED: own, ENGINE: engine_states(files[STALE], documents, options)}
        for seed in range(options.seeds):
            for source, known in states.items():
                name = f"{source}-{seed}"
                trained, files[name] = options.work / name, options.work / f"{name}.gguf"
                with replacing(bench.trunk, hidden=known_states(documents, known)):
                    bench.train(CELL.recipe(recipe, seed), documents, trained)
                if not files[name].exists():
                    head = load_artifact(trained / HEAD)
                    write_export(trunk, head, trained / EXPORT, adapter=None, link="hard", progress=progress)
                    mtp.graft(options.trunk, trained / EXPORT, files[name], head="f32")
    return files


def gain(served: dict[str, Served], seeds: int) -> dict[str, Any]:
    """Return the gain in tau of llama.cpp's states over those of the dequantised trunk, with its interval."""
    arms = {source: [served[f"{source}-{seed}"].arm for seed in range(seeds)] for source in (DEQUANTISED, ENGINE)}
    counts = {source: [one.counts(*one.decoded) for one in of_source] for source, of_source in arms.items()}
    # Texts of the two cells of an ablation.
    cells = {source: replace(CELL, text=source).name for source in counts}
    document = {
        "reference": cells[DEQUANTISED],
        "groups": {one.prompt_id: one.group for one in counts[ENGINE][0]},
        "counts": {
            cells[source]: {"0": [[(one.rounds, one.num_accepted_tokens) for one in seed] for seed in of_seeds]}
            for source, of_seeds in counts.items()
        },
    }
    (found,) = contrasts(document)
    return found


def main() -> None:
    """Train the heads, decode with them in llama-server, and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a recipe field")
    parser.add_argument("--work", type=Path, required=True, help="directory of answers, heads and GGUF files")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    options = parser.parse_intermixed_args()
    fixed = [f"run_dir={options.work / 'run'}", f"model.trunk={options.trunk}", "gate.enabled=false"]
    files = train_heads(load_recipe(options.recipe, [*options.overrides, *fixed]), options)
    served = ask_arms(files, options)
    plain = served[PLAIN]
    record = {
        "settings": settings_of(options, plain),
        "arms": {name: arm_of(file, served[name], plain) for name, file in files.items()},
        "difference": gain(served, options.seeds),
    }
    write_record(options, record)


if __name__ == "__main__":
    main()
