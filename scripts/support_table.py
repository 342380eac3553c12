#!/usr/bin/env python
"""Print the table of families and the line below it, made from the family records and the engines' records.

    python scripts/support_table.py            # print it
    python scripts/support_table.py --write    # put it into recipes/families.md

An engine's cell says ``run`` where a record in ``inference/benchmarks/engines/`` shows that the engine and our decoder
said the same on a checkpoint of the family, ``loads`` where the engine's loader takes the layout by its source and
nobody ran it here, and ``no`` where it does not use the head (``mtp-train inspect`` gives the reason). The line below
is of families whose releases have no head: who drafts with an attached one.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

from mtp_train.families import FAMILIES, Family
from mtp_train.families.gguf import GGUF_HEADS

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "recipes" / "families.md"
RECORDS = REPOSITORY / "inference" / "benchmarks" / "engines"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
ENGINE_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "transformers": "`use_mtp`"}
ENGINES = tuple(ENGINE_TITLES)
HEADER = (
    *("family", "`model_type`", "inspect, graft, export", "train, decode"),
    *("vLLM", "SGLang", "llama.cpp", "GGUF sidecar", "transformers `use_mtp`"),
)


def witnessed() -> set[tuple[str, str]]:
    """Return the pairs of engine and family that a record shows to agree with our decoder."""
    found = set()
    for path in RECORDS.glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        # A head of another kind is none of the family's.
        of_the_family = "tokens" in record["compared"] and "draft_model" not in record
        if record["verdict"] in ("equal", "explained") and of_the_family:
            found.add((record["engine"], record["checkpoint"]["family"]))
    return found


def row(family: Family, runs: set[tuple[str, str]]) -> list[str]:
    """Return a family's cells."""
    cells = [family.title, ", ".join(f"`{name}`" for name in family.model_types), "yes"]
    cells.append("yes" if family.borrowed is not None else "no")
    words = {True: "loads", False: "no", None: "?"}
    engines = [
        "run" if (engine, family.name) in runs else words[family.engines[engine].supported] for engine in ENGINES
    ]
    sidecar = "yes" if any(name in GGUF_HEADS for name in family.model_types) else "no"
    return [*cells, *engines[:3], sidecar, engines[3]]


def table() -> str:
    """Return the table in Markdown, and the line below it."""
    runs = witnessed()
    lines = [HEADER, ["---"] * len(HEADER), *(row(family, runs) for family in FAMILIES if not family.attached)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{attached()}"


def attached() -> str:
    """Return who drafts with heads that were attached; families of the most frequent answer are not named."""
    titles: dict[str, list[str]] = {}
    for family in FAMILIES:
        if family.attached:
            served = ", ".join(ENGINE_TITLES[engine] for engine in ENGINES if family.engines[engine].supported)
            titles.setdefault(served or "the built-in decoder alone", []).append(family.title)
    most = max(titles, key=lambda served: len(titles[served]))
    named = ", ".join(f"{', '.join(titles[served])} ({served})" for served in titles if served != most)
    count = sum(map(len, titles.values()))
    text = f"A head can be [attached](attach.md) to {count} families without one: {named}, and others ({most})."
    return textwrap.fill(text, width=120)


def main() -> None:
    """Print the table, or write it into its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into recipes/families.md")
    if not parser.parse_args().write:
        print(table())
        return
    text = PAGE.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
