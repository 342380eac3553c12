"""What the programs of all peers take, and what they print; only Python's own modules, as each runs elsewhere."""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path


def training_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the texts, the trunk and the settings of a training."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of a step")
    parser.add_argument("--share", type=float, required=True, help="of the texts to train on")
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def print_cost(options: argparse.Namespace, cpu_seconds: float) -> None:
    """Print the cost and the options of a training as JSON."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cost = {"cpu_seconds": round(cpu_seconds, 1), "peak_mib": round(peak), **vars(options)}
    print(json.dumps(cost, default=str))
