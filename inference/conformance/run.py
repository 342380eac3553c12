#!/usr/bin/env python
"""Run an engine on small heads of every kind, and say for each whether it drafts what the head should draft.

    python inference/conformance/run.py --engine vllm --python VENV/bin/python
    python inference/conformance/run.py --engine llama.cpp --python VENV/bin/python --binary llama-speculative-simple \
        --converter LLAMA.CPP/convert_hf_to_gguf.py --dtype float32
    python inference/conformance/run.py --heads llama/eagle3 --drafts FILE.jsonl

It needs nothing but Python. ``scripts/engines/programs`` say what an engine's environment needs. ``--drafts`` takes the
rounds of any other engine, a line for each: ``{"token_ids": [prompt and committed], "drafts": [...]}``. Exit code 1: a
head drafts otherwise, or did not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "scripts"))

from engines.launch import ENGINES, PROGRAMS, EngineProgramError, run_program  # noqa: E402 - from the added path
from engines.traces import Text, read_texts  # noqa: E402

AS_TRAINED = "as trained"
EXPECTED = "expected.json"
FITS = 0.98
"""The share of drafts that must be equal in bf16; in fp32 all must."""
SPLIT_LIKE = "qwen2"
"""The tokenizer of llama.cpp that splits the texts into the same words."""


class Drafted(NamedTuple):
    """The tokens before a round, the prompt and what was committed, and its drafts."""

    token_ids: tuple[int, ...]
    drafts: tuple[int, ...]


def main() -> int:
    """Print a line for each head and return the exit code."""
    arguments = parse()
    results = [judged(name, arguments) for name in arguments.heads]
    return int(not all(results))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    heads = sorted(str(path.parent.relative_to(HERE)) for path in HERE.rglob(EXPECTED))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine", choices=list(ENGINES))
    source.add_argument("--drafts", type=Path, help="rounds of another engine")
    parser.add_argument("--heads", nargs="+", default=heads, choices=heads, metavar="HEAD", help=", ".join(heads))
    parser.add_argument("--python", default=sys.executable, help="interpreter of the engine's environment")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--binary", type=Path, help="llama-speculative-simple")
    parser.add_argument("--converter", type=Path, help="convert_hf_to_gguf.py")
    parser.add_argument("--work", type=Path, default=Path("conformance"), help="for logs, and drafts that differ")
    return parser.parse_args()


def judged(name: str, arguments: argparse.Namespace) -> bool:
    """Print the line of a head; return whether it drafts as expected."""
    expected = json.loads((HERE / name / EXPECTED).read_text(encoding="utf-8"))
    try:
        rounds = rounds_of_file(arguments.drafts) if arguments.drafts else rounds_of_engine(name, expected, arguments)
    except EngineProgramError as error:
        print(f"{name}: did not run: {str(error).splitlines()[-1]}", flush=True)
        return False
    verdict, is_right = compare(expected["texts"], rounds, arguments.engine, arguments.dtype)
    print(f"{name}: {verdict}", flush=True)
    if not is_right:
        found = arguments.work / f"{name.replace('/', '-')}.jsonl"
        found.parent.mkdir(parents=True, exist_ok=True)
        found.write_text("".join(json.dumps(one._asdict()) + "\n" for one in rounds), encoding="utf-8")
        trunk, *draft = name.split("/")
        beside = f" --head {HERE / name}" if draft else ""
        print(f"  mtp-train probe {HERE / trunk}{beside} --drafts {found}")
    return is_right


def known_drafts(
    texts: Sequence[Mapping[str, Any]], engine: str | None, dtype: str
) -> dict[str, dict[tuple[int, ...], list[int]]]:
    """Return the expected drafts by the tokens before them, as trained and in an engine's own wiring if it has one.

    Args: As for :func:`compare`.
    """
    own = {engine} & {wiring for text in texts for wiring in text["wirings"]}
    known: dict[str, dict[tuple[int, ...], list[int]]] = {wiring: {} for wiring in (AS_TRAINED, *own)}
    for wiring, found in known.items():
        for text in texts:
            ids, start = (*text["prompt_ids"], *text["token_ids"]), len(text["prompt_ids"]) + 1
            # A text for which two wirings draft alike has only one of them.
            one = text["wirings"].get(wiring, text["wirings"][AS_TRAINED])
            for place, (drafts, count) in enumerate(zip(one["drafts"], one["decided"], strict=True), start):
                found[ids[:place]] = drafts if dtype == "float32" else drafts[:count]
    return known


def compare(
    texts: Sequence[Mapping[str, Any]], rounds: Iterable[Drafted], engine: str | None, dtype: str
) -> tuple[str, bool]:
    """Return the verdict on an engine's rounds, and whether it drafts as in training, or as it is known to.

    Args:
        texts: The expected texts.
        rounds: The engine's.
        engine: Its name, for the wiring that it is known to have.
        dtype: Its dtype. In bf16 only the drafts count that rounding does not decide.
    """
    known = known_drafts(texts, engine, dtype)
    total, equal, first = dict.fromkeys(known, 0), dict.fromkeys(known, 0), ""
    whole = [(*text["prompt_ids"], *text["token_ids"]) for text in texts]
    left = 0
    for one in rounds:
        if one.token_ids not in known[AS_TRAINED]:
            # Prompts alone are those of engines that draft before the first token.
            left += all(len(one.token_ids) <= len(ids) and one.token_ids != ids[: len(one.token_ids)] for ids in whole)
            continue
        for wiring, found in known.items():
            drafts = found[one.token_ids][: len(one.drafts)]
            total[wiring] += len(drafts)
            equal[wiring] += sum(ours == theirs for ours, theirs in zip(drafts, one.drafts, strict=False))
            if not first and list(one.drafts[: len(drafts)]) != drafts:
                first = f"; after {len(one.token_ids)} tokens {list(one.drafts)}, expected {drafts}"
    if left or not total[AS_TRAINED]:
        return (
            f"{left} rounds after other tokens than the trunk's greedy ones, expected none, and at least a draft",
            False,
        )
    said = ", ".join(f"{equal[wiring]} of {number} drafts {wiring}" for wiring, number in total.items())
    least = 1.0 if dtype == "float32" else FITS
    is_right = any(equal[wiring] >= least * number for wiring, number in total.items())
    return f"{said}{'' if is_right else first}", is_right


def rounds_of_file(path: Path) -> list[Drafted]:
    """Return the rounds of a file with one a line."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Drafted(tuple(row["token_ids"]), tuple(row["drafts"])) for row in rows]


def rounds_of_engine(name: str, expected: Mapping[str, Any], arguments: argparse.Namespace) -> list[Drafted]:
    """Decode the prompts with an engine and return its rounds."""
    trunk, *draft = name.split("/")
    work, texts = arguments.work / name, expected["texts"]
    work.mkdir(parents=True, exist_ok=True)
    kind = {"assistant": "mtp"}.get(draft[0], draft[0]) if draft else None
    job = {
        "checkpoint": str(HERE / trunk),
        "depth": expected["depth"],
        "max_new_tokens": len(texts[0]["token_ids"]),
        "dtype": arguments.dtype,
        "prompts": [text["prompt_ids"] for text in texts],
        "trust_remote_code": True,
        "draft": None if kind is None else {"kind": kind, "path": str(HERE / name)},
    }
    if arguments.binary:
        files = {"model_file": converted(HERE / trunk, work / "trunk.gguf", arguments)}
        if draft:
            files["draft_file"] = converted(HERE / name, work / "draft.gguf", arguments, of_trunk=HERE / trunk)
        job |= {name: str(path.resolve()) for name, path in {"binary": arguments.binary, **files}.items()}
    document = run_program(ENGINES[arguments.engine], arguments.python, job, work)
    return drafted_in(read_texts(document, job["prompts"]))


def drafted_in(texts: Iterable[Text]) -> list[Drafted]:
    """Return the rounds of texts that have drafts."""
    return [
        Drafted((*text.prompt_ids, *text.token_ids[:start]), one.drafts)
        for text in texts
        for start, one in zip(text.starts, text.rounds, strict=True)
        if one.drafts
    ]


def converted(model: Path, out: Path, arguments: argparse.Namespace, of_trunk: Path | None = None) -> Path:
    """Convert a checkpoint to a GGUF with llama.cpp's converter."""
    command = [arguments.python, str(PROGRAMS / "convert_to_gguf.py"), str(arguments.converter), SPLIT_LIKE, str(model)]
    command += ["--outfile", str(out), "--outtype", "f32"]
    command += [] if of_trunk is None else ["--target-model-dir", str(of_trunk)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise EngineProgramError(done.stdout.rstrip())
    return out


if __name__ == "__main__":
    sys.exit(main())
