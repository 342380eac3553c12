"""Measure fp32 and bf16 on a CPU for each stage, and check that ``auto`` chooses the faster one.

Each instruction set is measured in a separate process: the processor's own, and on processors with AVX-512 also AVX2,
by ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``. One thread is used. Figures are tokens per second of CPU time,
the median over repetitions in which the arms take turns, so that other work on the machine has little effect.

    python inference/benchmarks/cpu_precision.py --out inference/benchmarks/cpu

A trunk is stored in fp32, or in bf16 and multiplied in bf16, or in bf16 and converted to fp32 where that is faster
(``widened``: the choice of ``auto`` for a trunk that does not fit in fp32). Prints a table, and last one line of JSON.

    python inference/benchmarks/cpu_precision.py --rounds

measures rounds only, stored in bf16 and multiplied in either precision, by the number of rows, in this process:
``WIDE_ROWS`` in ``mtp_inference/batch.py`` is chosen from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch
import transformers

from mtp_inference import SpeculativeDecoder
from mtp_inference.batch import HELD, WIDE_ROWS, Widening, choose_widening
from mtp_inference.bench.machine import cpu_name
from mtp_inference.bench.output import finish, markdown
from mtp_inference.bench.subject import Subject, checkpoint_subject, shape_subject
from mtp_train.train.head_training import HeadTraining
from mtp_train.trunk.precision import COMPUTE_DTYPES, held_dtype, resolve_precision
from mtp_train.weights.demo import resolve

CPU = torch.device("cpu")
HELD_BACK = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
BEHIND = 0.95
"""Lowest speed of ``auto``, as a share of the faster arm's."""
Job = Callable[[], int]


class Sizes(NamedTuple):
    """Sizes of the jobs."""

    train_tokens: int = 256
    seq_len: int = 256
    prompt_tokens: int = 64
    new_tokens: int = 16
    rows: int = 16
    depth: int = 3
    repeats: int = 3


SMALL = Sizes(64, 32, 8, 4, 4, 3, 1)


def subjects(dtype: torch.dtype, names: Sequence[str]) -> dict[str, Subject]:
    """Return the demo's base with its head, and a wider model of random weights, stored in a dtype."""
    found: dict[str, Subject] = {}
    for name in names:
        if name == "demo":
            found[name] = checkpoint_subject(
                resolve("demo:base"), None, adapter=None, dtype=dtype, device=CPU, drafts=True
            )
        else:
            found[name] = shape_subject(name, dtype=dtype, device=CPU, seed=0)
    return found


def training(subject: Subject, precision: str, sizes: Sizes) -> Job:
    """Return a step of training on random tokens."""
    if subject.head is None:
        raise SystemExit("no head: expected a subject with one")
    module = HeadTraining(
        subject.trunk,
        subject.head.float().requires_grad_(True),
        num_depths=sizes.depth,
        kind="kl",
        temperature=1.0,
        compute_dtype=COMPUTE_DTYPES[precision],
    ).train()
    shape = (sizes.train_tokens // sizes.seq_len, sizes.seq_len)
    tokens_BT = torch.randint(len(subject.trunk.lm_head_VD), shape, generator=torch.Generator().manual_seed(0))
    zeros_BT = torch.zeros_like(tokens_BT)
    positions_BT = torch.arange(sizes.seq_len).expand(shape)

    def step() -> int:
        module(tokens_BT, positions_BT, zeros_BT, zeros_BT == 0, torch.ones(sizes.depth)).total.backward()
        module.zero_grad()
        return sizes.train_tokens

    return step


def decoding(subject: Subject, rows: int, depth: int, sizes: Sizes, widening: Widening | None) -> Job:
    """Return a job that decodes random prompts, with the decoder's own choice of stages in fp32 for None."""
    choose = choose_widening if widening is None else lambda *_unused: widening
    decoder = SpeculativeDecoder(subject.trunk, subject.drafting if depth else None, depth, (), max_batch=rows)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(len(subject.trunk.lm_head_VD), (rows, sizes.prompt_tokens), generator=generator).tolist()

    def decode() -> int:
        with patch("mtp_inference.decoder.choose_widening", choose):
            results = decoder.decode(prompts, sizes.new_tokens)
        return sum(len(result.token_ids) for result in results)

    return decode


def jobs(name: str, sizes: Sizes) -> dict[str, dict[str, Job]]:
    """Return the arms of each stage for a model."""
    held = {dtype: subjects(dtype, [name])[name] for dtype in (torch.float32, torch.bfloat16)}
    # Heads are trained in fp32, so training has its own subjects.
    stages: dict[str, dict[str, Job]] = {
        "training": {
            precision: training(subjects(torch.float32, [name])[name], precision, sizes) for precision in COMPUTE_DTYPES
        }
    }
    for stage, rows, depth in (
        ("regeneration", sizes.rows, 0),
        ("plain decoding", 1, 0),
        ("speculative decoding", 1, sizes.depth),
    ):
        stages[stage] = {
            "fp32": decoding(held[torch.float32], rows, depth, sizes, HELD),
            "bf16": decoding(held[torch.bfloat16], rows, depth, sizes, HELD),
            "widened": decoding(held[torch.bfloat16], rows, depth, sizes, None),
        }
    return stages


def rates(arms: Mapping[str, Job], repeats: int) -> dict[str, float]:
    """Return tokens per second of CPU time; the arms take turns, and the first turn does not count."""
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(repeats + 1):
        for arm, job in arms.items():
            started = time.process_time()
            tokens = job()
            if repeat:
                found[arm].append(tokens / (time.process_time() - started))
    return {arm: round(median(values), 1) for arm, values in found.items()}


def measure(names: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Measure every stage in this process, with the instruction set that the environment selects."""
    torch.set_num_threads(1)
    precision, reason = resolve_precision("auto", CPU)
    cells = []
    for name in names:
        num_weights = sum(one.numel() for one in subjects(torch.bfloat16, [name])[name].trunk.parameters())
        decodes_in = "fp32" if held_dtype(torch.bfloat16, num_weights, CPU) is torch.float32 else "widened"
        for stage, arms in jobs(name, sizes).items():
            found = rates(arms, sizes.repeats)
            auto = precision if stage == "training" else decodes_in
            # For a trunk in bf16, because fp32 does not fit, `auto` chooses between these two.
            cell = {"model": name, "stage": stage, "tokens_per_second": found, "auto": auto}
            cell["auto_over_better"] = round(found[auto] / max(found["fp32"], found["bf16"]), 3)
            if stage != "training":
                cell["widened_over_held"] = round(found["widened"] / found["bf16"], 3)
            cells.append(cell)
    return {"capability": torch.backends.cpu.get_cpu_capability(), "precision_reason": reason, "cells": cells}


def measure_rounds(names: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    """Measure rounds as stored and widened; prompts are short, and run in fp32 in both arms."""
    torch.set_num_threads(1)
    short = sizes._replace(prompt_tokens=8)
    cells: list[dict[str, Any]] = []
    for name in names:
        subject = subjects(torch.bfloat16, [name])[name]
        for rows in (WIDE_ROWS // 2, WIDE_ROWS, 2 * WIDE_ROWS, 4 * WIDE_ROWS):
            for depth in (0, sizes.depth):
                arms = {
                    "bf16": decoding(subject, rows, depth, short, Widening(True, False)),
                    "widened": decoding(subject, rows, depth, short, Widening(True, True)),
                }
                found = rates(arms, sizes.repeats)
                ratio = round(found["widened"] / found["bf16"], 2)
                cells.append({"model": name, "rows": rows, "depth": depth, **found, "widened_over_held": ratio})
    return cells


def measured_apart(arguments: Sequence[str], held_back: bool) -> dict[str, Any]:
    """Measure in a separate process, since torch selects the instruction set when it is loaded."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (HELD_BACK if held_back else {})
    command = [sys.executable, __file__, "--here", *arguments]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found | {"held_back": held_back}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each model and stage."""
    header = ("instruction set", "model", "stage", "fp32", "bf16", "bf16, widened", "auto", "auto / better")
    rows = []
    for setting in found:
        name = setting["capability"] + (", held back" if setting["held_back"] else "")
        for cell in setting["cells"]:
            rate = cell["tokens_per_second"]
            columns = [name, cell["model"], cell["stage"], rate["fp32"], rate["bf16"], rate.get("widened", "")]
            rows.append([*columns, cell["auto"], cell["auto_over_better"]])
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo,64m", help="demo, or a shape of the bench; several by commas")
    parser.add_argument("--small", action="store_true", help="one short repetition, to see that it runs")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--here", action="store_true", help="this process's instruction set only, as JSON")
    parser.add_argument("--rounds", action="store_true", help="rounds by the number of rows only, in this process")
    options = parser.parse_args(arguments)
    sizes = SMALL if options.small else Sizes()
    if options.rounds:
        cells = measure_rounds(options.models.split(","), sizes)
        print(markdown([*cells[0]], (cell.values() for cell in cells)))
        print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "rounds": cells}))
        return
    if options.here:
        print(json.dumps(measure(options.models.split(","), sizes)))
        return
    passed = ["--models", options.models, *(["--small"] if options.small else [])]
    found = [measured_apart(passed, held_back=False)]
    if found[0]["capability"] == "AVX512":
        found.append(measured_apart(passed, held_back=True))
    worst = min(cell["auto_over_better"] for setting in found for cell in setting["cells"])
    document = {
        "benchmark": "cpu precision",
        "hardware": {"processor": cpu_name(), "cores": psutil.cpu_count(logical=False), "threads": 1},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "date": date.today().isoformat(),
        "results": found,
        "worst_auto_over_better": worst,
        "within_bound": worst >= BEHIND,
    }
    print(table(found))
    finish(document, options.out, f"precision-{found[0]['capability'].lower()}.json")


if __name__ == "__main__":
    main()
