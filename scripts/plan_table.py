#!/usr/bin/env python
"""Print memory and hours of retraining a head at the sizes of released models, as ``mtp-train check`` plans them.

    python scripts/plan_table.py            # print the table
    python scripts/plan_table.py --write    # put it into recipes/README.md

Each row is ``check`` of one recipe (:data:`RECIPE`) on the shapes of a model: its config alone, no weights.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import DeepseekV3Config, Qwen3_5TextConfig, Qwen3MoeConfig

import mtp_train as mtp
from support_table import markdown

PAGE = Path(__file__).parents[1] / "recipes" / "README.md"
BEGIN, END = "<!-- plan -->", "<!-- /plan -->"
DEVICE, MEMORY_GIB, PROCESSES = "h100", 80, (1, 8, 16)
GIB = 1 << 30
Config = dict[str, Any]

_QWEN3_5 = {"mtp_num_hidden_layers": 1, "architectures": ["Qwen3_5ForCausalLM"]}
SHAPES: Mapping[str, Config] = {
    "Qwen3.5 9B": Qwen3_5TextConfig(
        hidden_size=4096, num_hidden_layers=32, intermediate_size=12288, num_attention_heads=16, num_key_value_heads=4
    ).to_dict()
    | _QWEN3_5,
    "Qwen3.6 27B": Qwen3_5TextConfig(
        hidden_size=5120,
        num_hidden_layers=64,
        intermediate_size=17408,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_value_heads=48,
    ).to_dict()
    | _QWEN3_5,
    "Qwen3 235B-A22B, EAGLE-3": Qwen3MoeConfig(
        hidden_size=4096,
        num_hidden_layers=94,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
    ).to_dict()
    | {"architectures": ["Qwen3MoeForCausalLM"]},
    "DeepSeek V3 671B": DeepseekV3Config().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]},
}
RECIPE: Config = {
    "head": {"num_depths": 3},
    "data": {"seq_len_tokens": 2048, "regenerate": {"max_prompts": 20_000, "max_new_tokens": 512, "batch_size": 64}},
    "train": {"max_steps": 500, "tokens_per_step": 65_536, "lr": 1e-4, "micro_batch_sequences": 1},
    "evaluate": {"prompts": 64, "max_new_tokens": 128},
}
HEADER = ("model", "H100s", "GiB each, whole trunk", "GiB each, FSDP2", "answers", "training", "evaluation")


def planned(
    name: str, processes: int, directory: Path, device: str = DEVICE, overrides: Mapping[str, Any] | None = None
) -> mtp.CheckResult:
    """Return the plan of a model's recipe, from a config that is written to a directory."""
    trunk, data = directory / name, directory / "prompts.jsonl"
    trunk.mkdir(exist_ok=True)
    (trunk / "config.json").write_text(json.dumps(SHAPES[name], default=str))
    data.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    is_new = "EAGLE-3" in name
    start = {"kind": "eagle3", "init": "random"} if is_new else {"init": "native"}
    arms = ["none", *([] if is_new else ["native"]), "retrained"]
    recipe = RECIPE | {
        "run_dir": str(directory / "run"),
        "model": {"trunk": str(trunk)},
        "head": RECIPE["head"] | start,
        "data": RECIPE["data"] | {"sources": [{"path": str(data)}]},
        "evaluate": RECIPE["evaluate"] | {"arms": arms},
    }
    return mtp.check(recipe, overrides or {}, processes=processes, device=device)


def row(name: str, processes: int, found: mtp.CheckResult) -> list[str]:
    """Return the cells of a row; memory that does not fit is crossed out."""
    hours, shards = found.hours, found.memory_in_shards
    times = ["-"] * 3 if hours is None else [f"{one:.1f} h" for one in (hours.regenerate, hours.train, hours.evaluate)]
    return [
        name,
        str(processes),
        _gib(found.memory.total_bytes),
        "-" if shards is None else _gib(shards.total_bytes),
        *times,
    ]


def _gib(count: int) -> str:
    shown = f"{count / GIB:.0f}"
    return shown if count <= MEMORY_GIB * GIB else f"~~{shown}~~"


def table() -> str:
    """Return the table in Markdown."""
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            row(name, processes, planned(name, processes, Path(directory)))
            for name in SHAPES
            for processes in PROCESSES
        ]
    return markdown(HEADER, rows)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description="Print memory and hours of retraining a head.")
    parser.add_argument("--write", action="store_true", help="put the table into recipes/README.md")
    if not parser.parse_args().write:
        print(table())
        return
    page = PAGE.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", flags=re.DOTALL)
    PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
