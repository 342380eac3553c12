#!/usr/bin/env python
"""Print the table of families and the sentence below it, from the family records and the records of engines.

    python scripts/support_table.py            # print it
    python scripts/support_table.py --write    # put it into recipes/families.md

The cell of an engine is ``run`` where a record in ``inference/benchmarks/engines/`` shows equal output of the engine
and our decoder on a checkpoint of the family. It is ``loads`` where, by its source, the engine's loader accepts the
layout, without a run here. It is ``no`` where the engine does not use the head (``mtp-train inspect`` gives the
reason). The sentence below lists the engines that draft with an attached head, for families whose releases have none.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS
from mtp_train.families import FAMILIES, Family, of_kind
from mtp_train.families.kinds.assistant import GEMMA4

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "recipes" / "families.md"
RECORDS = REPOSITORY / "inference" / "benchmarks" / "engines"
ENGINE_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "transformers": "`use_mtp`"}
ENGINES = tuple(ENGINE_TITLES)
HEADER = (
    *("family", "`model_type`"),
    *("vLLM", "SGLang", "llama.cpp", "GGUF sidecar", "transformers `use_mtp`"),
)


def markdown(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, ["---"] * len(header), *rows))


def witnessed() -> set[tuple[str, str]]:
    """Return the (engine, family) pairs whose record shows output equal to our decoder's, and is evidence of it."""
    found = set()
    for path in RECORDS.glob("*.json"):
        record = read_json(path)
        # Records of EAGLE and Medusa heads do not count for the family's own MTP head or assistant.
        kind = record.get("draft_model", {}).get("kind", "mtp")
        of_the_family = "tokens" in record["compared"] and kind in ("mtp", "assistant")
        # Without a negative control that changed the result, equal output is no evidence.
        is_evidence = record["verdict"] in ("equal", "explained") and record["controls"]["changed"] > 0
        if is_evidence and of_the_family:
            found.add((record["engine"], record["checkpoint"]["family"]))
    return found


def row(family: Family, runs: set[tuple[str, str]]) -> list[str]:
    """Return the cells of a family."""
    cells = [family.title, ", ".join(f"`{name}`" for name in family.model_types)]
    words = {True: "loads", False: "no", None: "?"}
    engines = [
        "run" if (engine, family.name) in runs else words[family.serving[engine].supported] for engine in ENGINES
    ]
    sidecar = "yes" if any(name in GGUF_HEADS for name in family.model_types) else "no"
    return [*cells, *engines[:3], sidecar, engines[3]]


def table() -> str:
    """Return the table and the sentence below it, in Markdown."""
    runs = witnessed()
    rows = [row(family, runs) for family in FAMILIES if not family.attached]
    # transformers decodes with an assistant, and not by ``use_mtp``.
    rows.append([*row(of_kind(GEMMA4, "assistant"), runs)[:-1], "no"])
    return f"{markdown(HEADER, rows)}\n\n{attached()}"


def attached() -> str:
    """Return the sentence on attached heads; it does not name the families with the most frequent set of engines."""
    titles: dict[str, list[str]] = {}
    for family in FAMILIES:
        if family.attached:
            served = ", ".join(ENGINE_TITLES[engine] for engine in ENGINES if family.serving[engine].supported)
            titles.setdefault(served or "the built-in decoder alone", []).append(family.title)
    most = max(titles, key=lambda served: len(titles[served]))
    named = ", ".join(f"{', '.join(titles[served])} ({served})" for served in titles if served != most)
    count = sum(map(len, titles.values()))
    text = f"A head can be [attached](attach.md) to {count} families without one: {named}, and others ({most})."
    return textwrap.fill(text, width=120)


def print_or_write(page: Path, name: str, table: Callable[[], str], doc: str | None = __doc__) -> None:
    """Print a table, or write it to its page, between the comments ``name`` and ``/name``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.relative_to(REPOSITORY)}")
    if not parser.parse_args().write:
        print(table())
        return
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", flags=re.DOTALL)
    text = page.read_text(encoding="utf-8")
    page.write_text(between.sub(lambda _: f"{begin}\n{table()}\n{end}", text), encoding="utf-8")


if __name__ == "__main__":
    print_or_write(PAGE, "families", table)
