"""What was measured, with what: settings, tables, and one JSON document."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from mtp_inference.bench.measure import Row
from mtp_inference.bench.subject import Subject

TABLE_WIDTH = 118
Columns = Mapping[str, tuple[str, int]]
"""Field to heading and decimals."""

DECODING: Columns = {
    "prompt_tokens": ("prompt", 0),
    "batch": ("batch", 0),
    "arm": ("arm", 0),
    "depth": ("depth", 0),
    "tokens_per_second": ("tok/s", 1),
    "tokens_per_second_end_to_end": ("end to end", 1),
    "tau": ("tau", 2),
    "speedup": ("speedup", 2),
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


def settings(
    subject: Subject, device: torch.device, asked: Mapping[str, Any], bandwidth: float, decoding: Sequence[Row]
) -> dict[str, Any]:
    """Say what was measured where; figures of other settings do not compare.

    Args:
        subject: What was measured.
        device: Where.
        asked: What the command line said.
        bandwidth: Measured bytes per second of a copy.
        decoding: What decoding measured: it says how many rounds were captured.
    """
    weight_VD = subject.trunk.lm_head_VD
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
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
        "captured_rounds": sum(row["captured_rounds"] or 0 for row in decoding),
        "decoding": "greedy, no token ends a text",
        "round_pieces": "each timed alone, on rows out of use",
        **asked,
    }


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(document: Mapping[str, Any]) -> None:
    """Print settings and tables for people and, last, the document on one line."""
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
    # A column that has nothing to say would only take room.
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
