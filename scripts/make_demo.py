#!/usr/bin/env python
"""Make the checkpoints and prompts that ``mtp_train.demo`` ships, from the standard library's source, on a CPU.

    python scripts/make_demo.py base finetune check install record --work DIR

Stages run in the order given and leave their results in DIR; a stage whose result is there must be removed first.
``install`` replaces the assets in the package; ``record`` then measures the arms that are too slow for the recipe.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo_maker.install import install
from demo_maker.record import record_arms
from demo_maker.stages import make_base, make_finetune, read_samples
from demo_maker.texts import gather_texts
from mtp_train.weights.writing import write_json

STAGES = ("base", "finetune", "check", "install", "record")
REPOSITORY = Path(__file__).parents[1]
ASSETS = REPOSITORY / "mtp_train" / "demo" / "assets"
RECIPE = REPOSITORY / "recipes" / "retrain_head.yaml"


def main() -> None:
    """Run the stages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True, help="where the stages leave their results")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    texts = gather_texts()
    for stage in arguments.stages:
        if stage == "base":
            make_base(texts, arguments.work)
        elif stage == "finetune":
            make_finetune(texts, arguments.work)
        elif stage == "check":
            figures = read_samples(arguments.work, texts, num_prompts=64, max_new_tokens=160)
            write_json(arguments.work / "check.json", figures)
            print(json.dumps(figures, indent=2))
        elif stage == "install":
            install(texts, arguments.work, ASSETS)
        elif stage == "record":
            record_arms(texts, RECIPE, arguments.work, ASSETS / "recorded.json")


if __name__ == "__main__":
    main()
