"""Measure decoding with and without drafts, and the parts of a round: ``python -m mtp_inference.bench``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging as transformers_logging

from mtp_inference.bench.clock import copy_bandwidth
from mtp_inference.bench.machine import cpu_name
from mtp_inference.bench.measurements import Plan, Row, measure_decoding, measure_prefill, measure_rounds, num_runs
from mtp_inference.bench.subject import SHAPES, Subject, checkpoint_subject, shape_subject, trained_subject
from mtp_inference.bench.texts import Prompts, read_prompts
from mtp_inference.kernels.trial import runs_kernels
from mtp_inference.requests import require_depth
from mtp_train.errors import MtpError, OutputExistsError
from mtp_train.heads.attention import without_cudnn_attention

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TABLE_WIDTH = 118
Columns = Mapping[str, tuple[str, int]]
"""Field to its heading and number of decimals."""

DECODING: Columns = {
    "prompt_tokens": ("prompt", 0),
    "batch": ("batch", 0),
    "arm": ("arm", 0),
    "depth": ("depth", 0),
    "tokens_per_second": ("tok/s", 1),
    "tokens_per_second_end_to_end": ("end to end", 1),
    "tau": ("tau", 2),
    "speedup": ("speedup", 2),
    "speedup_paired": ("paired", 2),
    "speedup_least": ("from", 2),
    "speedup_most": ("to", 2),
    "round_ms": ("round ms", 2),
    "over_transformers": ("over tf", 2),
    "over_transformers_mtp": ("tf mtp", 2),
    "identical_texts": ("same", 0),
    "texts": ("of", 0),
}
ROUNDS: Columns = {
    "prompt_tokens": ("prompt", 0),
    "batch": ("batch", 0),
    "depth": ("depth", 0),
    "verify_ms": ("verify", 2),
    "head_ms": ("head", 2),
    "lm_head_ms": ("lm_head", 2),
    "commit_ms": ("commit", 2),
    "rest_ms": ("rest", 2),
    "round_alone_ms": ("round", 2),
    "round_ms": ("decoding", 2),
    "ideal_round_ms": ("roofline", 2),
    "roofline_share": ("share", 2),
    "cost_ratio": ("cost", 2),
    "speedup_share": ("gain share", 2),
}
PREFILL: Columns = {
    "prompt_tokens": ("prompt", 0),
    "batch": ("batch", 0),
    "depth": ("depth", 0),
    "tokens_per_second_without_head": ("tok/s without head", 1),
    "tokens_per_second_with_head": ("with head", 1),
    "ratio": ("ratio", 3),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print settings, tables and, last, everything as one line of JSON.

    Returns:
        The exit code: 0 for done, 2 for wrong input. A bug raises.
    """
    options = _parser().parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console(stderr=True)
    try:
        plan = _plan(options)
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            document = benchmark(options, plan, progress)
    except MtpError as error:
        print(f"mtp_inference.bench: {error}", file=sys.stderr)
        return error.exit_code
    show(document)
    return 0


# For transformers' arms as well: cuDNN plans every new shape, which would count as their time.
@without_cudnn_attention()
def benchmark(options: argparse.Namespace, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Run the measurements of the command line, and save the document after each.

    Returns:
        ``settings``, the rows ``decoding``, ``rounds`` and ``prefill``, and ``complete``, which is false in a file that
        was saved before the end of a run.

    Raises:
        MtpError: The options contradict each other, or the model cannot be loaded.
    """
    device = torch.device(options.device)
    subject = replace(_subject(options, plan, device, progress), fuses=options.fuses)
    if subject.drafting is not None:
        subject.drafting.check(subject.trunk, max(plan.depths))
    given = read_prompts(options.prompts, subject) if options.prompts is not None else None
    prompts = Prompts(given, subject.text, plan.seed)
    for batch, length in plan.cells:
        prompts.groups(batch, length)
    bandwidth = copy_bandwidth(device, plan.repeats)
    task = progress.add_task("measuring", total=num_runs(plan, subject))

    def on_run() -> None:
        progress.advance(task)

    decoding: list[Row] = []
    rounds: list[Row] = []
    prefill: list[Row] = []

    def document(complete: bool) -> dict[str, Any]:
        return {
            "benchmark": "decoding",
            "complete": complete,
            "settings": settings(subject, device, _asked(options, plan), bandwidth, decoding),
            "decoding": decoding,
            "rounds": rounds,
            "prefill": prefill,
        }

    for batch, length in plan.cells:
        rows = measure_decoding(subject, plan, prompts, batch, length, on_run)
        decoding += rows
        _save(document(False), options.out)
        rounds += measure_rounds(subject, plan, rows, bandwidth, on_run)
        if plan.prefill:
            prefill.append(measure_prefill(subject, plan, prompts, batch, length, on_run))
        _save(document(False), options.out)
    whole = document(True)
    _save(whole, options.out)
    return whole


def _save(document: dict[str, Any], out: Path | None) -> None:
    """Write the document atomically, so that a killed run leaves a complete file."""
    if out is None:
        return
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(out)


def _subject(options: argparse.Namespace, plan: Plan, device: torch.device, progress: Progress) -> Subject:
    dtype = DTYPES[options.dtype]
    if options.checkpoint is not None:
        return checkpoint_subject(
            options.checkpoint,
            options.head,
            adapter=options.adapter,
            dtype=dtype,
            device=device,
            drafts=max(plan.depths) > 0,
        )
    if options.train_steps is None:
        return shape_subject(options.shape, dtype=dtype, device=device, seed=plan.seed)
    task = progress.add_task("training the tiny model", total=options.train_steps)
    return trained_subject(
        options.shape, options.train_steps, device=device, seed=plan.seed, on_step=lambda: progress.advance(task)
    )


def _plan(options: argparse.Namespace) -> Plan:
    """Check what can be checked before anything is loaded.

    Raises:
        MtpError: The options do not fit together.
    """
    _require_subject(options)
    for depth in options.depths:
        require_depth(depth)
    drafts = max(options.depths) > 0
    if options.accept is not None and not (drafts and 0.0 <= options.accept <= 1.0):
        raise MtpError(
            f"--accept: {options.accept} at --depths {_joined(options.depths)}; expected a chance from 0 to 1, and a "
            "depth to draft at. Use 0.8, or the acceptance of a head you know."
        )
    if options.prefill and not drafts:
        raise MtpError("--prefill: no depth above 0; expected a head to compare with. Add a depth to --depths.")
    if options.new_tokens < 2:
        raise MtpError(f"--new-tokens: {options.new_tokens}; expected 2 or more: prefill makes the first. Use 128.")
    if options.repeats < 1:
        raise MtpError(f"--repeats: {options.repeats}; expected 1 or more. Use 5.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise MtpError("--device: cuda, and torch sees no GPU; expected one. Use --device cpu.")
    if options.out is not None and options.out.exists():
        raise OutputExistsError(f"--out: {options.out} exists; expected a new file. Name another.")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise MtpError(f"--out: {options.out} lies in no directory; expected one that exists. Make it first.")
    return Plan(
        depths=options.depths,
        batches=options.batches,
        prompt_lengths=options.prompt_lengths,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        acceptance=options.accept,
        against_transformers=options.against is not None,
        prefill=options.prefill,
        seed=options.seed,
    )


def _require_subject(options: argparse.Namespace) -> None:
    if (options.checkpoint is None) == (options.shape is None):
        found = "neither" if options.shape is None else "both"
        raise MtpError(f"CKPT and --shape: {found} given; expected one of them. Name a checkpoint or a shape.")
    if options.head is not None and options.checkpoint is None:
        raise MtpError(f"--head: {options.head}, with a shape; expected a checkpoint that it belongs to. Leave it out.")
    if options.adapter is not None and options.checkpoint is None:
        raise MtpError(f"--adapter: {options.adapter}, with a shape; expected a checkpoint to put it on. Leave it out.")
    if options.train_steps is None:
        return
    if options.shape is None or not SHAPES[options.shape].is_tiny or options.train_steps < 1:
        tiny = " or ".join(name for name, shape in SHAPES.items() if shape.is_tiny)
        raise MtpError(
            f"--train-steps: {options.train_steps} for {options.shape or options.checkpoint}; expected 1 or more, for "
            f"a tiny shape. Use --shape {tiny}."
        )
    if options.dtype not in ("auto", "float32"):
        raise MtpError(f"--dtype: {options.dtype} with --train-steps; expected float32. Leave --dtype out.")


def _asked(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    return {
        "depths": list(plan.depths),
        "batches": list(plan.batches),
        "prompt_lengths": list(plan.prompt_lengths),
        "new_tokens": plan.new_tokens,
        "prompts": str(options.prompts) if options.prompts is not None else "drawn",
        "accept": plan.acceptance,
        "against": options.against,
        "repeats": plan.repeats,
        "seed": plan.seed,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mtp_inference.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", nargs="?", metavar="CKPT", help="a checkpoint directory or a hub id")
    parser.add_argument("--head", help="a head directory, a run, or a checkpoint to take the head from (default: CKPT)")
    parser.add_argument("--adapter", metavar="DIR", help="a peft adapter to apply to the trunk of CKPT, unmerged")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights in a shape, instead of CKPT")
    parser.add_argument(
        "--train-steps",
        type=int,
        metavar="N",
        help="train a tiny shape on synthetic text first, so that drafts are accepted",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="auto", help="auto: fp32 on a CPU, else as stored")
    parser.add_argument("--depths", type=_numbers(0), default=(0, 1, 2, 3, 5, 7), metavar="K,...")
    parser.add_argument("--batches", type=_numbers(1), default=(1, 4, 16), metavar="B,...")
    parser.add_argument("--prompt-lengths", type=_numbers(1), default=(32, 2048), metavar="T,...", help="in tokens")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="new tokens of every text")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help='lines of {"prompt_ids": [...]} or {"prompt": "..."}'
    )
    parser.add_argument(
        "--accept",
        type=float,
        metavar="A",
        help="replace the drafts: each is right with this probability, at the same cost",
    )
    parser.add_argument("--against", choices=("transformers",), help="also measure its generate on the same trunk")
    parser.add_argument(
        "--no-fuse", dest="fuses", action="store_false", help="run torch's operations where rounds have fused kernels"
    )
    parser.add_argument("--prefill", action="store_true", help="time prefill with and without the head")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repeats; figures are medians")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and --accept")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the JSON document to this file too, after each measurement"
    )
    return parser


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if not all(word.strip().isdecimal() and int(word) >= least for word in words):
            raise argparse.ArgumentTypeError(
                f"found {text}; expected whole numbers from {least} on, with commas between them"
            )
        return tuple(dict.fromkeys(int(word) for word in words))

    return parse


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def settings(
    subject: Subject, device: torch.device, asked: Mapping[str, Any], bandwidth: float, decoding: Sequence[Row]
) -> dict[str, Any]:
    """Return the settings of a measurement; only figures with equal settings can be compared.

    Args:
        subject: The measured model.
        device: Device of the measurement.
        asked: Options of the command line.
        bandwidth: Measured bytes per second of a copy.
        decoding: Rows of the decoding measurement, for the number of captured rounds.
    """
    weight_VD = subject.trunk.lm_head_VD
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "copy_gb_per_second": round(bandwidth / 1e9, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_linear_attention": _version("flash-linear-attention"),
        **subject.facts,
        "trunk_parameters": sum(one.numel() for one in subject.trunk.parameters()),
        "head_parameters": sum(one.numel() for one in subject.head.parameters()) if subject.head else 0,
        "dtype": str(weight_VD.dtype).removeprefix("torch."),
        "device": str(device),
        "fused_kernels": subject.fuses and runs_kernels(device),
        "captured_rounds": sum(row["captured_rounds"] or 0 for row in decoding),
        "decoding": "greedy, no token ends a text",
        "round_pieces": "each timed alone, on rows out of use",
        **asked,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(document: Mapping[str, Any]) -> None:
    """Print settings and tables, and the document as the last line."""
    console = Console(width=TABLE_WIDTH, highlight=False)
    for name, value in document["settings"].items():
        console.print(f"{name}: {value}", markup=False)
    console.print(_table("Decoding: medians over the repeats, prefill apart", DECODING, document["decoding"]))
    console.print(_table("A round in ms, each piece timed alone", ROUNDS, document["rounds"]))
    if document["prefill"]:
        console.print(_table("Prefill", PREFILL, document["prefill"]))
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def _table(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    # Omit empty columns.
    shown = {name: column for name, column in columns.items() if any(row[name] is not None for row in rows)}
    for name, (heading, _) in shown.items():
        table.add_column(heading, justify="left" if name == "arm" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name], decimals) for name, (_, decimals) in shown.items()))
    return table


def _cell(value: Any, decimals: int) -> str:
    if value is None:
        return ""
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
