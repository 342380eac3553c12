"""Print what a benchmark measured, and write it to a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_train.weights.writing import write_json


def finish(document: Mapping[str, Any], directory: Path | None, name: str) -> None:
    """Write a document to a file of a directory, unless that is None, and print it as the last line of the output."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / name, document)
    print(json.dumps(document))


def print_columns(records: Sequence[Mapping[str, object]]) -> None:
    """Print records with the same fields as columns of 12 characters, under the names of the fields."""
    for line in (records[0], *(record.values() for record in records)):
        print("".join(f"{cell!s:>12}" for cell in line))


def markdown(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, ["---"] * len(header), *rows))
