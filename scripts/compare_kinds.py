#!/usr/bin/env python
"""Attach a head of every kind to one trunk without a head, and compare them on prompts that no head was trained on.

    python scripts/compare_kinds.py llama DIR [section.field=value ...]

The trunk is made by ``scripts/make_text_trunk.py``. All heads are trained by ``recipes/attach_head.yaml``, with the
same steps, text and depth. DIR gets the trunk, a run of each kind, and the comparison; existing results are reused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from make_text_trunk import FAMILIES
from mtp_train.checkpoints.demo import demo_path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "attach_head.yaml"
STARTS = {"mtp": "copy_last_layer", "eagle": "random", "eagle3": "random", "medusa": "random"}
FIELDS = ("arm", "temperature", "rule", "depth", "tau", "tau_ci95", "marginal", "prompts", "rounds")
HELD_OUT_SHARE = 10
"""One in this many groups of prompts is held out for the comparison."""


def main() -> None:
    """Make the trunk, the runs and the comparison, unless they exist already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the recipe, for all kinds")
    arguments = parser.parse_args()
    work = arguments.directory
    trunk = work / "trunk"
    work.mkdir(parents=True, exist_ok=True)
    if not trunk.exists():
        run(["scripts/make_text_trunk.py", arguments.family, str(trunk)])
    split_prompts(work)
    for kind, start in STARTS.items():
        attach(kind, start, work, arguments.overrides)
    arms = [f"{kind}={trunk}+{work / kind / 'head'}" for kind in STARTS]
    flags = [
        "--suite",
        str(work / "held_out.jsonl"),
        "--prompts-per-task",
        "48",
        "--max-new-tokens",
        "128",
        "--batch",
        "16",
    ]
    grid = ["--temperatures", "0", "1", "--rules", "greedy", "sampled", "--depths", "1", "3"]
    run(["-m", "mtp_train", "compare", *arms, *flags, *grid, "--out", str(work / "comparison")])
    print(json.dumps({"family": arguments.family, "overrides": arguments.overrides, "cells": cells(work)}))


def cells(work: Path) -> list[dict[str, Any]]:
    """Return the figures of the comparison for each arm and setting."""
    report = json.loads((work / "comparison" / "report.json").read_text(encoding="utf-8"))
    return [{name: cell[name] for name in FIELDS} for cell in report["cells"] if cell["task"] == "all"]


def attach(kind: str, start: str, work: Path, overrides: Sequence[str]) -> None:
    """Train a head of one kind, or resume its run."""
    own = [
        f"run_dir={work / kind}",
        f"model.trunk={work / 'trunk'}",
        f"data.sources.0.path={work / 'train.jsonl'}",
        f"head.kind={kind}",
        f"head.init={start}",
    ]
    run(["-m", "mtp_train", str(RECIPE), *own, *overrides])


def split_prompts(work: Path) -> None:
    """Write the demo's prompts as two files, for training and comparison, without splitting a group."""
    records = [json.loads(line) for line in demo_path("prompts").read_text(encoding="utf-8").splitlines()]
    groups = sorted({record["group"] for record in records})
    kept = set(groups[::HELD_OUT_SHARE])
    for name, chosen in (("train", set(groups) - kept), ("held_out", kept)):
        lines = [json.dumps(record) + "\n" for record in records if record["group"] in chosen]
        (work / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def run(command: Sequence[str]) -> None:
    """Run a command, and exit with its status if it fails."""
    print("+", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
