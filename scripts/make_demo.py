#!/usr/bin/env python
"""Make the checkpoints and prompts that ``mtp_train.checkpoints.demo`` ships, from Python's own source, on a CPU.

    python scripts/make_demo.py base finetune check install record --work DIR
    python scripts/make_demo.py base finetune texts --size small --work DIR

Stages run in the given order and write their results to DIR. Remove the result of a stage to run it again. ``install``
replaces the assets in the package; ``record`` then measures the arms that are too slow for the recipe. ``texts`` writes
the same prompts and code as ``install``, but to DIR, for a pair of another size outside of the package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from demo_maker.install import code_lines, install, prompt_lines, write_lines
from demo_maker.record import record_arms
from demo_maker.sizes import SIZES
from demo_maker.stages import make_base, make_finetune, read_samples
from demo_maker.texts import gather_texts
from mtp_train.checkpoints.writing import write_json

STAGES = ("base", "finetune", "check", "texts", "install", "record")
REPOSITORY = Path(__file__).parents[1]
ASSETS = REPOSITORY / "mtp_train" / "demo_assets"
RECIPE = REPOSITORY / "recipes" / "retrain_head.yaml"


def main() -> None:
    """Run the stages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True, help="where the stages leave their results")
    parser.add_argument("--size", choices=SIZES, default="demo", help="the pair that ships, or another one")
    parser.add_argument("--device", type=torch.device, default="cpu", help="where base, finetune and check run")
    arguments = parser.parse_args()
    if arguments.size != "demo" and {"install", "record"} & set(arguments.stages):
        parser.error(f"--size {arguments.size}: what ships is of size demo; leave install and record out")
    size, device = SIZES[arguments.size], arguments.device
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts = gather_texts()
    for stage in arguments.stages:
        if stage == "base":
            make_base(texts, arguments.work, size, device)
        elif stage == "finetune":
            make_finetune(texts, arguments.work, size, device)
        elif stage == "check":
            figures = read_samples(arguments.work, texts, device, num_prompts=64, max_new_tokens=160)
            write_json(arguments.work / "check.json", figures)
            print(json.dumps(figures, indent=2))
        elif stage == "texts":
            write_lines(arguments.work / "prompts.jsonl", prompt_lines(texts))
            write_lines(arguments.work / "code.jsonl", code_lines(texts.unseen_code))
        elif stage == "install":
            install(texts, arguments.work, ASSETS)
        elif stage == "record":
            record_arms(texts, RECIPE, arguments.work, ASSETS / "recorded.json")


if __name__ == "__main__":
    main()
