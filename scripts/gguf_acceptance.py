#!/usr/bin/env python
"""Count the drafts that llama-server accepts from heads inside GGUF files of one trunk, by its own counters.

    python scripts/make_demo.py base finetune texts --size wide --work wide      # a pair that K-quants fit
    python convert_hf_to_gguf.py wide/finetune --outfile bf16.gguf --outtype bf16
    llama-quantize bf16.gguf tuned.gguf Q4_K_M
    mtp-train graft tuned.gguf --from wide/base --out stale.gguf
    mtp-train rescue tuned.gguf --from wide/base --data prompts.jsonl --out rescued
    mtp-train run rescued/recipe.yaml run_dir=bf16 model.trunk=wide/finetune gate.enabled=false
    mtp-train graft tuned.gguf --from bf16/export --out of-bf16.gguf
    python scripts/gguf_acceptance.py --server llama-server --trunk tuned.gguf --suite held-out.jsonl --title NAME \
        --out RECORD.json --kinds rescued/export stale=stale.gguf trunk=of-bf16.gguf pack=rescued/tuned-mtp.gguf

Both files of prompts are parts of ``wide/prompts.jsonl`` without a common group. Arm ``none`` decodes the first file
without drafts. The record has the differences of arms, paired by prompt, with 95 % intervals over groups of prompts.
``--kinds HEAD`` adds that head in several quantisations (K-quants by llama-quantize beside the server). It also adds
how far the log-probabilities of the dequantised trunk are from the server's. Records of other titles in RECORD.json are
kept.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.progress import Progress

import mtp_train as mtp
from mtp_train.acceptance.intervals import tau_difference
from mtp_train.answers.endpoint import RESPONSE_TIMEOUT_SECONDS
from mtp_train.checkpoints.gguf.model_file import gguf_tokenizer, open_gguf
from mtp_train.checkpoints.writing import write_json
from mtp_train.evaluation.arms import ArmSpec, load_arm_trunk, open_arm
from mtp_train.evaluation.grid import EvaluationGrid, grid_prompts
from mtp_train.evaluation.served import Server, ask
from mtp_train.evaluation.statistics import Served, same_texts
from mtp_train.runs.checkpoint_tools.gguf_files import stored_types

PORT, SECONDS_TO_LOAD = 18_080, 600
URL = f"http://127.0.0.1:{PORT}"
GRAFTED, QUANTISED = ("f32", "bf16", "f16", "q8_0"), ("Q6_K", "Q4_K", "Q4_0")
"""Storage of a head: by the package ``gguf``, and by llama-quantize."""
PLAIN, EXACT = "none", "head-f32"
TOP, POSITIONS, LOGIT_PROMPTS = 50, 48, 8
"""Tokens by rank and positions of each prompt whose log-probabilities are compared, and prompts."""


@contextlib.contextmanager
def serving(file: Path, options: argparse.Namespace, *, drafts: bool) -> Iterator[None]:
    """Serve a file while the block runs."""
    flags = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(options.depth)] if drafts else []
    words = [options.server, "-m", file, "--port", str(PORT), "-t", str(options.threads), "-np", "1", "--metrics"]
    with subprocess.Popen([*words, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(SECONDS_TO_LOAD):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{URL}/health").is_success:
                        break
                if server.poll() is not None:
                    raise SystemExit(f"{file}: {options.server} ended with {server.returncode}")
                time.sleep(1)
            yield
        finally:
            server.kill()


def quantised_heads(trunk: Path, head: str, server: str, work: Path) -> tuple[dict[str, Path], list[str]]:
    """Write the trunk with a head in every storage; return the files by arm, and what cannot be written here."""
    arms = {}
    for kind in GRAFTED:
        arms[f"head-{kind}"] = work / f"{kind}.gguf"
        mtp.graft(trunk, head, arms[f"head-{kind}"], head=kind)
    beside = Path(shutil.which(server) or server).with_name("llama-quantize")
    quantiser = str(beside) if beside.is_file() else shutil.which("llama-quantize")
    if quantiser is None:
        return arms, [f"head-{kind}: needs llama-quantize" for kind in QUANTISED]
    alone = mtp.export(arms[EXACT], work / "alone", head_only=True).out
    missing = []
    for kind in QUANTISED:
        new = work / f"alone-{kind}.gguf"
        subprocess.run([quantiser, "--allow-requantize", "--pure", alone, new, kind], capture_output=True, check=True)
        found = stored_types(open_gguf(new).head.values())
        if found.startswith(kind):
            arms[f"head-{kind}"] = work / f"{kind}.gguf"
            mtp.graft(trunk, new, arms[f"head-{kind}"])
        else:
            missing.append(f"head-{kind}: llama-quantize writes {found} for rows of this length")
    return arms, missing


def logit_distance(trunk: Path, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Return how far log-probabilities of the dequantised trunk are from the server's, over the server's top tokens."""
    ours = load_arm_trunk(open_arm(ArmSpec("trunk", str(trunk), None)), torch.device("cpu"))
    differences, same = [], []
    for ids in prompts:
        wanted = {"prompt": list(ids), "n_predict": POSITIONS, "temperature": 0, "n_probs": TOP, "cache_prompt": False}
        told = httpx.post(f"{URL}/completion", json=wanted, timeout=None).json()["completion_probabilities"]
        tokens_1T = torch.tensor([[*ids, *(one["id"] for one in told)]])
        with torch.no_grad():
            logits_TV = ours.logits(ours.hidden(tokens_1T)[0, len(ids) - 1 : -1]).float()
        for one, logs_V in zip(told, logits_TV.log_softmax(-1), strict=True):
            theirs = {top["id"]: top["logprob"] for top in one["top_logprobs"]}
            differences.append(np.abs([float(logs_V[token]) - value for token, value in theirs.items()]))
            same.append(int(logs_V.argmax()) == one["id"])
    every = np.concatenate(differences)
    return {
        "dtype": ours.dtype_name,
        "positions": len(differences),
        "tokens_by_rank": TOP,
        "mean": round(float(every.mean()), 4),
        "mean_of_first": round(float(np.mean([one[0] for one in differences])), 4),
        "max": round(float(every.max()), 4),
        "same_first_choice": round(float(np.mean(same)), 4),
    }


def arm_of(file: Path, trunk: Path, served: Served, plain: Served) -> dict[str, Any]:
    """Return the record of an arm."""
    model, given = open_gguf(file), open_gguf(trunk).tensors
    cell = served.cells[0]
    return {
        "head": stored_types(model.head.values()) if cell.draft_tokens else None,
        "trunk_bytes_equal": all(np.array_equal(model.tensors[name].data, one.data) for name, one in given.items()),
        "tokens": cell.new_tokens,
        "rounds": cell.rounds,
        "drafted": cell.draft_tokens,
        "accepted": cell.accepted_tokens,
        "tau": round(cell.tau or 0.0, 3),
        "tau_ci95": [round(one, 3) for one in cell.tau_ci95 or ()],
        "same_texts": same_texts(served.arm, plain.arm),
    }


def difference(first: Served, second: Served) -> dict[str, Any]:
    """Return tau of the first arm less that of the second, with its interval over groups."""
    (setting,) = first.arm.decoded
    pair = first.arm.against(second.arm, setting)
    found = tau_difference(pair.head, pair.baseline)
    interval = [round(one, 3) for one in found.ci95 or ()]
    arms = {"first": first.arm.name, "second": second.arm.name}
    return {**arms, "delta_tau": round(found.value, 3), "ci95": interval, "groups": found.groups}


def main() -> None:
    """Decode with every arm, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="NAME=FILE")
    for name in ("server", "trunk", "suite", "title", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--kinds", metavar="HEAD", help="a checkpoint or GGUF file whose head is quantised")
    for name, default in (("count", 96), ("depth", 3), ("threads", 1), ("new-tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    trunk = Path(options.trunk)
    sizes = {"prompts_per_task": options.count, "max_new_tokens": options.new_tokens}
    grid = EvaluationGrid(suite=options.suite, temperatures=(0.0,), **sizes)
    prompts = [one.prompt_ids for one in grid_prompts(grid, gguf_tokenizer(trunk), (None,))[None]]
    named = {name: Path(file) for name, _, file in (arm.partition("=") for arm in options.arms)}
    pairs = [pair[::-1] for pair in combinations(named, 2)]
    served, found, missing = dict[str, Served](), dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as work, Progress(disable=True) as progress:
        kinds, missing = (
            quantised_heads(trunk, options.kinds, options.server, Path(work)) if options.kinds else ({}, [])
        )
        server = partial(Server, url=URL, checkpoint=options.trunk, request_timeout_seconds=RESPONSE_TIMEOUT_SECONDS)
        for name, file in {PLAIN: next(iter(named.values())), **named, **kinds}.items():
            with serving(file, options, drafts=name != PLAIN):
                served[name] = ask(server(name=name), grid, progress)
                if name == PLAIN:
                    distance = logit_distance(trunk, prompts[:LOGIT_PROMPTS])
            found[name] = arm_of(file, trunk, served[name], served[PLAIN])
            print(name, json.dumps(found[name]), flush=True)
    pairs += [(kind, EXACT) for kind in kinds if kind != EXACT]
    differences = [difference(served[one], served[other]) for one, other in pairs]
    version = subprocess.run([options.server, "--version"], capture_output=True, text=True, check=True).stderr
    given = [word.replace(options.server, Path(options.server).name) for word in sys.argv[1:]]
    settings: dict[str, Any] = {"command": shlex.join(["python", "scripts/gguf_acceptance.py", *given])}
    settings |= {key: vars(options)[key] for key in ("depth", "threads", "new_tokens")}
    settings |= {"llama.cpp": version.splitlines()[0], "date": str(datetime.date.today()), "prompts": len(prompts)}
    blocks = open_gguf(trunk)
    kept = stored_types(one for name, one in blocks.tensors.items() if name not in blocks.head)
    settings |= {"trunk": kept, "groups": served[PLAIN].cells[0].groups}
    record = {"settings": settings, "arms": found, "differences": differences, "unavailable": missing}
    record["log_probabilities_dequantised_less_served"] = distance
    out = Path(options.out)
    write_json(out, {**(json.loads(out.read_text()) if out.is_file() else {}), options.title: record})
    print(json.dumps(record["differences"]), json.dumps(distance), *missing, sep="\n")


if __name__ == "__main__":
    main()
