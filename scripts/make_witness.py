#!/usr/bin/env python
"""Make a small trained checkpoint of a family, with its head, that engines load on a CPU.

    python scripts/make_witness.py qwen3_next DIR
    python scripts/make_witness.py llama DIR --kind eagle3 --draft-vocab 500

The same family and seed give the same weights on one machine. ``scripts/engine_parity.py`` compares an engine with our
decoder on this checkpoint and ``DIR/prompts.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtp_train.head_kinds import head_kind_names
from witness_maker.making import make_witness
from witness_maker.shapes import SHAPES


def main() -> None:
    """Make the checkpoint of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=head_kind_names(), default="mtp", help="of the head")
    parser.add_argument("--draft-vocab", type=int, help="tokens that a head of another kind than mtp may draft")
    parser.add_argument("--sglang", action="store_true", help="of sizes that SGLang's CPU kernels take")
    arguments = parser.parse_args()
    figures = make_witness(
        arguments.family,
        arguments.directory,
        num_steps=arguments.steps,
        seed=arguments.seed,
        kind=arguments.kind,
        num_drafted=arguments.draft_vocab,
        sglang=arguments.sglang,
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
