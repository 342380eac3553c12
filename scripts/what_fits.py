#!/usr/bin/env python
"""Print what fits on 24, 48, 80 and 8 x 80 GB, by ``mtp-train check``, for trunks from 2B to 355B.

    python scripts/what_fits.py            # print it
    python scripts/what_fits.py --write    # put it into recipes/distributed.md

``large_trunks.json`` has what the released configs have of the shapes, without what changes no plan. A cell has every
change with which a run fits that does not fit as it is, in the order of ``check``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_train import CheckResult, check
from mtp_train.checkpoints.files import read_json
from scripts.support_table import REPOSITORY, markdown, print_or_write

PAGE = REPOSITORY / "recipes" / "distributed.md"
SHAPES = read_json(Path(__file__).parent / "large_trunks.json")
SHAPES["Qwen3.5-9B"] = read_json(REPOSITORY / "inference/benchmarks/qwen3_5_9b.json")
ORDER = ("Qwen3-1.7B", "Qwen3.5-9B", "Qwen3-32B", "Llama-3.3-70B", "GLM-4.5-Air", "Qwen3-235B-A22B", "GLM-4.6-FP8")
MACHINES = {"24 GB": ("24GiB", 1), "48 GB": ("48GiB", 1), "80 GB": ("80GiB", 1), "8 x 80 GB": ("80GiB", 8)}
SEQ_LEN, STEP_TOKENS = 4096, 131_072
CHANGES = {
    "offload": "model.offload=cpu",
    "8bit": "=8bit",
    "4bit": "=4bit",
    "LoRA": "head.lora",
    "recomputing": "gradient_checkpointing",
    "answers": "data.regenerate.endpoint",
    "states": "train.states.endpoint",
}
"""Words of the table for overrides of ``check``. A server that gives states answers too."""


def has_head(config: Mapping[str, Any]) -> bool:
    return any("nextn" in key or "mtp" in key for key in (*config, *config.get("text_config", {})))


def planned(directory: Path, name: str, processes: int, device: str, changes: Mapping[str, Any]) -> CheckResult:
    """Return what ``check`` finds for a trunk, by its shape, with changes to a recipe that trains 500 steps in bf16."""
    trunk = directory / "trunk"
    trunk.mkdir(exist_ok=True)
    (trunk / "config.json").write_text(json.dumps(SHAPES[name]))
    (directory / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    init = "native" if has_head(SHAPES[name]) else "random"
    recipe = {
        "run_dir": str(directory / "run"),
        "model": {"trunk": str(trunk)},
        "head": {"num_depths": 3, "init": init},
        "data": {
            "sources": [{"path": str(directory / "prompts.jsonl")}],
            "seq_len_tokens": SEQ_LEN,
            "regenerate": {"max_prompts": 20_000},
        },
        "train": {"max_steps": 500, "tokens_per_step": STEP_TOKENS, "lr": 1e-4, "micro_batch_sequences": 1},
        "evaluate": {"arms": ["none", "retrained", *(["native"] if init == "native" else [])]},
    }
    return check(recipe, changes, processes=processes, device=device)


def cell(found: CheckResult) -> str:
    """Return whether a run fits, or with which changes it does."""
    if found.room.problem is None:
        return "yes" + ", in shards" * found.room.needs_shards
    changes = [change for change in found.fitting if "--processes" not in change or "--processes 1" in change]
    fitting = [[word for word, part in CHANGES.items() if part in change] for change in changes]
    return ", ".join(" + ".join(words) for words in fitting).replace("answers + states", "states") or "no"


def table() -> str:
    """Return the table in Markdown."""
    with tempfile.TemporaryDirectory() as directory:
        found = {
            name: [planned(Path(directory), name, count, device, {}) for device, count in MACHINES.values()]
            for name in ORDER
        }
    rows = [
        [name, *map(cell, plans), f"`{'retrain' if has_head(SHAPES[name]) else 'attach'}_head`"]
        for name, plans in found.items()
    ]
    return markdown(("trunk", *MACHINES, "recipe"), rows)


if __name__ == "__main__":
    print_or_write(PAGE, "fits", table, __doc__)
