"""Read the records of JSON files as they are written.

The JSON builder of `datasets` infers one type for a column: a string that looks like a time becomes one, and a column
that mixes strings with lists or objects is stored as JSON text, from which strings that are valid JSON themselves come
back parsed. Here `datasets` resolves, decompresses and splits the files as text, and Python's parser reads that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal

import datasets

BYTE_ORDER_MARK = "\ufeff"

Row = dict[str, Any]
Files = Mapping[str, Sequence[str]]
"""The files of each split."""


def read_json(files: Files, split: str, max_rows: int | None, *, streaming: bool) -> tuple[list[str], Iterable[Row]]:
    """Return the names of the columns, and the rows, each with all columns.

    A file holds JSON lines, or one document: a list of objects, or one object.

    Args:
        files: The files of each split.
        split: Which rows; slices are allowed where they are not streamed.
        max_rows: Return no more than the first ``max_rows``.
        streaming: Whether to read these alone. Otherwise every row of the split is checked.

    Raises:
        ValueError: A row is not a JSON object, or there is no such split.
    """
    unit = _unit(files)
    if streaming:
        first = list(islice(_objects(_texts(files, unit, split=split, streaming=True)), max_rows))
        names = list(dict.fromkeys(name for row in first for name in row))
        return names, _filled(first, names)
    texts = _texts(files, unit)
    # Slices count rows: a line may be blank, and a document may hold many.
    wanted = datasets.ReadInstruction.from_spec(split)
    named = (part.splitname for part in wanted.to_absolute({name: len(table) for name, table in texts.items()}))
    found, counts = dict[str, None](), dict.fromkeys(texts, 0)
    for name in dict.fromkeys(named):
        for row in _objects(texts[name]):
            found |= dict.fromkeys(row)
            counts[name] += 1
    parts = wanted.to_absolute(counts)
    rows = chain.from_iterable(islice(_objects(texts[part.splitname]), part.from_, part.to) for part in parts)
    return list(found), _filled(islice(rows, max_rows), list(found))


def _unit(files: Files) -> Literal["line", "document"]:
    """Say whether rows are lines or files, by the first line that is not blank."""
    (first, *_), *_ = files.values()
    lines = _texts({"train": [first]}, "line", split="train", streaming=True)
    line = next((row["text"] for row in lines if row["text"].strip()), "{}")
    try:
        return "line" if isinstance(json.loads(line.lstrip(BYTE_ORDER_MARK)), dict) else "document"
    except ValueError:
        return "document"


def _texts(files: Files, unit: str, *, split: str | None = None, streaming: bool = False) -> Any:
    """Return texts in the column ``text``: of a split, or of all by name."""
    named = {name: list(paths) for name, paths in files.items()}
    return datasets.load_dataset("text", data_files=named, sample_by=unit, split=split, streaming=streaming)


def _objects(texts: Iterable[Row]) -> Iterator[Row]:
    number = 0
    for row in texts:
        text = row["text"].strip().removeprefix(BYTE_ORDER_MARK)
        if not text:
            continue
        value = json.loads(text)
        for entry in value if isinstance(value, list) else [value]:
            number += 1
            if not isinstance(entry, dict):
                raise ValueError(f"record {number} is not an object")
            yield entry


def _filled(rows: Iterable[Row], names: Sequence[str]) -> Iterator[Row]:
    empty = dict.fromkeys(names)
    return ({**empty, **row} for row in rows)
