#!/usr/bin/env python
"""Draw the atlas: when retraining a head pays. A small trunk, its fine-tunes, and heads that differ in one thing.

    python scripts/atlas.py base                     # 5M parameters with a native head: half an hour of a core
    python scripts/atlas.py cells                    # every fine-tune and every cell that has no record yet
    python scripts/atlas.py cells json style         # those of two fine-tunes
    python scripts/atlas.py page                     # the tables and pictures of the page, from the records

``--work`` (``runs/atlas``) holds the base, fine-tunes and heads, ``--records`` (``inference/benchmarks/atlas``) a file
of each fine-tune. A cell that is recorded is not run again, so the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from atlas_maker.cells import NAMES, Place, Study
from atlas_maker.claims import read_records
from atlas_maker.finetunes import Base, tune
from atlas_maker.page import page
from atlas_maker.texts import base_texts
from demo_maker.sizes import SIZES
from demo_maker.stages import make_base
from demo_maker.texts import gather_texts
from demo_maker.tokenizer import TURN_END

RECORDS = Path(__file__).parents[1] / "inference" / "benchmarks" / "atlas"


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("base", "cells", "page"))
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="FINETUNE")
    parser.add_argument("--work", type=Path, default=Path("runs/atlas"), help="default: runs/atlas")
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    if options.stage == "page":
        page(read_records(options.records), options.records)
        return
    # Not resolved: which prompts are chosen depends on the path of their file.
    place = Place(options.work, options.records, gather_texts())
    if options.stage == "base" and not place.base.is_dir():
        place.work.mkdir(parents=True, exist_ok=True)
        make_base(base_texts(place.texts), place.work, SIZES["atlas"], torch.device("cpu"), TURN_END)
    if options.stage == "cells":
        base, console = Base.open(place.base, place.texts), Console()
        for name in options.names or NAMES:
            tune(name, base, place.tuned(name))
            Study(place, name, console).run()


if __name__ == "__main__":
    main()
