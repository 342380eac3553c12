#!/usr/bin/env python
"""Count the drafts that llama-server accepts from heads inside GGUF files of one trunk, by its own counters.

    python scripts/make_demo.py base finetune texts --size wide --work wide      # a pair that K-quants fit
    python convert_hf_to_gguf.py wide/finetune --outfile bf16.gguf --outtype bf16
    llama-quantize bf16.gguf tuned.gguf Q4_K_M
    mtp-train graft tuned.gguf --from wide/base --out stale.gguf
    mtp-train rescue tuned.gguf --from wide/base --data prompts.jsonl --out rescued
    mtp-train graft tuned.gguf --from rescued/export --head f32 --out f32.gguf   # the same head, stored otherwise
    python scripts/gguf_acceptance.py --server llama-server --trunk tuned.gguf --suite held-out.jsonl --title NAME \
        --out RECORD.json stale=stale.gguf f32=f32.gguf pack=rescued/tuned-mtp.gguf

The converter recognises tokenizers by a hash: let its ``get_vocab_base_pre`` return ``qwen35`` for a pair of your own.
Both files of prompts are parts of ``wide/prompts.jsonl`` without a common group. Arm ``none`` decodes the first file
without drafts. The record has the differences of arms, paired by prompt, with 95 % intervals over groups of prompts.
Records of other titles in RECORD.json are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from mtp_train.acceptance.intervals import tau_difference
from mtp_train.answers.endpoint import RESPONSE_TIMEOUT_SECONDS
from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.gguf.model_file import open_gguf
from mtp_train.checkpoints.writing import write_json
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.served import Server, ask
from mtp_train.evaluation.statistics import Served, same_texts
from mtp_train.runs.checkpoint_tools.gguf_files import stored_types
from mtp_train.runs.run_directory import environment_facts

PORT, SECONDS_TO_LOAD = 18_080, 600
URL = f"http://127.0.0.1:{PORT}"
PLAIN = "none"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that every measurement by llama-server has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("server", "trunk", "suite", "title", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("count", 96), ("depth", 3), ("threads", 1), ("new-tokens", 96)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    return parser


@contextlib.contextmanager
def serving(file: Path, options: argparse.Namespace, *flags: str) -> Iterator[None]:
    """Serve a file while the block runs."""
    words = [options.server, "-m", file, "--port", str(PORT), "-t", str(options.threads), "-np", "1", *flags]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
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


def ask_arms(files: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Served]:
    """Decode the suite with the head of every file, and as arm ``none`` with the first one's trunk alone."""
    sizes = {"prompts_per_task": options.count, "max_new_tokens": options.new_tokens}
    grid = EvaluationGrid(suite=options.suite, temperatures=(0.0,), **sizes)
    drafting = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(options.depth))
    served = {}
    with Progress(disable=True) as progress:
        for name, file in {PLAIN: next(iter(files.values())), **files}.items():
            server = Server(
                name=name, url=URL, checkpoint=options.trunk, request_timeout_seconds=RESPONSE_TIMEOUT_SECONDS
            )
            with serving(file, options, "--metrics", *(drafting if name != PLAIN else ())):
                served[name] = ask(server, grid, progress)
            print(name, served[name].cells[0].tau, flush=True)
    return served


def arm_of(file: Path, served: Served, plain: Served) -> dict[str, Any]:
    """Return the record of an arm."""
    cell = served.cells[0]
    return {
        "head": stored_types(open_gguf(file).head.values()) if cell.draft_tokens else None,
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


def settings_of(options: argparse.Namespace, plain: Served) -> dict[str, Any]:
    """Return the command, the versions and the sizes of a record."""
    version = subprocess.run([options.server, "--version"], capture_output=True, text=True, check=True).stderr
    given = [word.replace(options.server, Path(options.server).name) for word in sys.argv[1:]]
    blocks, environment = open_gguf(Path(options.trunk)), environment_facts()
    return {
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *given]),
        **{key: vars(options)[key] for key in ("depth", "threads", "new_tokens")},
        "llama.cpp": version.splitlines()[0],
        "versions": environment["versions"],
        "hardware": environment["hardware"],
        "date": str(datetime.date.today()),
        "prompts": plain.cells[0].prompts,
        "trunk": stored_types(one for name, one in blocks.tensors.items() if name not in blocks.head),
        "groups": plain.cells[0].groups,
    }


def write_record(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write a record under its title, beside those of other titles."""
    out = Path(options.out)
    write_json(out, {**(read_json(out) if out.is_file() else {}), options.title: record})
    print(json.dumps(record))


def main() -> None:
    """Decode with every arm, and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("arms", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args()
    files = {name: Path(file) for name, _, file in (arm.partition("=") for arm in options.arms)}
    served = ask_arms(files, options)
    plain = served[PLAIN]
    found = {PLAIN: next(iter(files.values())), **files}
    record = {
        "settings": settings_of(options, plain),
        "arms": {name: arm_of(file, served[name], plain) for name, file in found.items()},
        "differences": [difference(served[second], served[first]) for first, second in combinations(files, 2)],
    }
    write_record(options, record)


if __name__ == "__main__":
    main()
