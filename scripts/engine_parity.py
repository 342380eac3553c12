#!/usr/bin/env python
"""Compare our decoder with a serving engine in its own Python environment, token by token and draft by draft.

    python scripts/engine_parity.py EXPORT --engine vllm --python OTHER_VENV/bin/python --out RECORD.json
    python scripts/engine_parity.py TRUNK --draft RUN/export --engine vllm --python ... --out ...

Both sides decode the same prompts from the same checkpoint, greedily, past EOS where the engine can. The verdict in the
record is ``equal``, ``explained`` (every difference starts at a near tie of two tokens, ``engines/verdict.py``) or
``different``, which ends in exit code 1. So does a record in which no negative control changed the result: it is no
evidence. The programs under ``engines/programs/`` document what each engine's environment needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines.launch import ENGINES, EngineProgramError
from engines.verdict import RANKING, is_evidence
from engines.witness import DTYPES, Task, record, witness
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.locations import open_location
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.tokenize import build_prompts, choose_prompts
from mtp_train.errors import MtpError
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.inputs import split_records

RECIPE = Path(__file__).parents[1] / "recipes" / "retrain_head.yaml"


def main() -> int:
    """Run the comparison of the command line, write its record, and return the exit code."""
    arguments = parse()
    try:
        with tempfile.TemporaryDirectory(prefix="engine-parity-") as temporary:
            content = run(arguments, arguments.work or Path(temporary))
    except (MtpError, EngineProgramError) as error:
        print(error, file=sys.stderr)
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, content)
    if content["verdict"] == RANKING[-1]:
        return 1
    if not is_evidence(content):
        print(
            f"{arguments.out}: no evidence: none of {content['controls']['run']} negative controls changed the result; "
            "expected one at least. Choose texts and a head that can tell, such as those of scripts/make_witness.py.",
            file=sys.stderr,
        )
        return 1
    return 0


def run(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare at every requested depth and return the record."""
    task = make_task(arguments, work)
    entries: dict[int, dict[str, Any]] = {}
    versions: dict[str, str] = {}
    for depth in arguments.depths:
        entries[depth], versions = witness(task, depth, with_controls=depth == max(arguments.depths))
        print(f"depth {depth}: {entries[depth]['verdict']}", flush=True)
    return record(task, arguments.engine, entries, versions)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", help="a checkpoint with a head: a directory, a hub id or demo:base")
    parser.add_argument("--engine", required=True, choices=list(ENGINES))
    parser.add_argument("--python", default=sys.executable, help="interpreter of the engine's environment")
    parser.add_argument("--binary", type=Path, help="the engine's program, for engines that are one")
    parser.add_argument("--model-file", type=Path, help="the same checkpoint as the engine reads it, e.g. a GGUF")
    parser.add_argument("--draft", type=Path, help="a draft model, or an assistant, for the trunk EXPORT")
    parser.add_argument(
        "--draft-file",
        type=Path,
        help="the draft model, or the head beside MODEL_FILE, as the engine reads it, e.g. a GGUF",
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--prompts", type=Path, help="a .json list of token lists; default: the demo's prompts")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of both sides; default: bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the engine run code beside the weights")
    parser.add_argument("--work", type=Path, help="keep the jobs, the engine's documents and its logs there")
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    return parser.parse_args()


def make_task(arguments: argparse.Namespace, work: Path) -> Task:
    """Return the task of the command line.

    Raises:
        MtpError: The checkpoint or the prompts cannot be read.
    """
    checkpoint = open_location(arguments.export)
    files = {"binary": arguments.binary, "model_file": arguments.model_file, "draft_file": arguments.draft_file}
    return Task(
        engine=ENGINES[arguments.engine],
        checkpoint=checkpoint,
        prompts=read_prompts(arguments, checkpoint),
        max_new_tokens=arguments.max_new_tokens,
        dtype=arguments.dtype,
        python=arguments.python,
        files={name: str(path.resolve()) for name, path in files.items() if path is not None},
        work=work,
        trust_remote_code=arguments.trust_remote_code,
        draft=arguments.draft,
    )


def read_prompts(arguments: argparse.Namespace, checkpoint: Checkpoint) -> list[list[int]]:
    """Return the token ids of the given prompts, else of the demo's held-out prompts."""
    if arguments.prompts is not None:
        listed: list[list[int]] = json.loads(arguments.prompts.read_text(encoding="utf-8"))
        return listed[: arguments.num_prompts]
    recipe = load_recipe(RECIPE)
    _, records = split_records(recipe)
    chosen = choose_prompts(build_prompts(records, load_tokenizer(checkpoint)), arguments.num_prompts, recipe.seed)
    return [list(prompt.prompt_ids) for prompt in chosen]


if __name__ == "__main__":
    sys.exit(main())
