#!/usr/bin/env python
"""Draw what a finished run prints last, as an SVG for the README.

python scripts/demo_screen.py runs/retrain_head recipes/images/demo.svg
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

import mtp_train as mtp
from mtp_train.report.summary import summary


def main() -> None:
    """Draw the report of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True)
    console.print(summary(mtp.open_report(args.run)))
    console.save_svg(str(args.out), title="scripts/demo.sh")


if __name__ == "__main__":
    main()
