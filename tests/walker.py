"""Run commands one after the other, as a user of a terminal does, and say how each ended; for ``test_walk.py``.

The first argument is a JSON file: for each command its directory, below that of the file, and its words.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import pytest

from mtp_train.cli.main import main
from mtp_train.runs import rescue
from runs import few_timed_prompts, shorten_probes

MARK = "=== "
"""Begins the line before a command's output, with its words, and the line after it, with its exit code."""


def run(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    todo = Path(sys.argv[1])
    with few_timed_prompts(), pytest.MonkeyPatch.context() as patch:
        shorten_probes(patch)
        patch.setattr(rescue, "LEAST_TAU", 1.0)
        for directory, words in json.loads(todo.read_text()):
            os.chdir(todo.parent / directory)
            print(f"{MARK}{json.dumps(words)}", flush=True)
            print(f"{MARK}{run(words)}", flush=True)
