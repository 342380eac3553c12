"""Read records from local files or a dataset of the hub.

Local JSON, CSV and text files are read here: ``datasets`` turns text that looks like a date or a number into one, and
does not tell which file a paragraph is from. Everything else goes through the builders of ``datasets``.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import logging
import lzma
import re
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import fsspec
from datasets.config import DATASET_INFO_FILENAME, DATASET_STATE_JSON_FILENAME, DATASETDICT_JSON_FILENAME

from mtp_train.checkpoints.demo import GROUP_FIELD
from mtp_train.data.records import (
    Chat,
    Content,
    PlainText,
    Record,
    content_group,
    parse_content,
    parse_text,
    require_text_only,
)
from mtp_train.errors import DataError, UnsupportedRecordError, one_line

logger = logging.getLogger(__name__)

UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    zlib.error,
    csv.Error,
    lzma.LZMAError,
    datasets.exceptions.DatasetsError,
)
"""The errors of damaged files: of the file system, the decoders, the decompressors and ``datasets``."""
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KNOWN_FILES = "a .json, .jsonl, .csv, .parquet or .txt file (.gz, .xz, .bz2 or .zst too)"
LONGEST_CELL = 1 << 30
"""Characters of a cell of a CSV table. A document may be longer than the limit that the module starts with."""
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_response": ("prompt", "response"),
    "instruction": ("instruction", "input", "output"),
    "text": ("text",),
    "turns": ("turns",),
}
"""The columns of each format; a record has at least the first."""
TASK_FIELDS = ("task", "category")
"""Columns that name the task of a suite's record."""
CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs")
"""Columns beside those of a format, which belong to its chat."""
COLUMNS = (*chain.from_iterable(FORMATS.values()), *CHAT_COLUMNS)
OTHER_NAMES = {"messages": "conversations", "response": "completion"}
QUESTION_AND_ANSWER = {
    "instruction": re.compile(
        r"question|query|problem|prompt|instruction|input|request|user|human|\bq\b", re.IGNORECASE
    ),
    "output": re.compile(r"answer|response|reply|solution|output|completion|assistant|\ba\b", re.IGNORECASE),
}
"""Parts of usual names for columns that are the turns of a chat."""
KNOWN_COLUMNS = (
    "`messages` or `conversations`, `prompt` (with `response` or `completion`), `instruction` with `output`, `turns`, "
    "or `text`"
)

_NOT_SPACE = re.compile(r"\S")

Row = dict[str, Any]
OwnedRow = tuple[Row, str | None, str]
"""A row, the first paragraph of the text file that it is from (None for rows of other kinds), and the place of its
record (:attr:`Record.place`)."""


def load_records(
    path: str,
    *,
    config: str | None = None,
    split: str = "train",
    columns: Mapping[str, str] = MappingProxyType({}),
    group_field: str | None = None,
    task: str = "",
    name: str | None = None,
) -> list[Record]:
    """Read one source.

    Args:
        path: A local .json, .jsonl, .csv, .parquet or .txt file (its paragraphs, separated by blank lines, are the
            records), plain or compressed; a directory or a glob of files of one kind; a directory that
            ``save_to_disk`` of ``datasets`` wrote; or the id of a dataset on the hub.
        config: The configuration of a dataset on the hub, or of a directory that defines some.
        split: A split of the dataset, slices allowed (``train[:1000]``). A local file has one split, ``train``; in a
            directory the file names define the splits.
        columns: For columns of ``FORMATS`` and ``CHAT_COLUMNS``, the names that they have in the source.
        group_field: The column whose value groups records. None groups by content (:func:`content_group`), and the
            paragraphs of a .txt file by their file.
        task: Of a suite of prompts, the task of the records that name none. Its column ``group``, if there is one,
            groups records.
        name: Name of the source in record ids and messages; None uses the path.

    Raises:
        DataError: There is no such file or dataset, it is empty, its columns fit no format or several, or a record is
            malformed.
    """
    name = name or path
    source = _Source(path, name, local_files(path, name), config, split)
    if source.files is not None and config is not None and not source.place.is_dir():
        raise DataError(f"{name}: config {config!r} of local files; expected null, as they have none. Leave it out.")
    names, rows = source.read()
    chosen = _format_of(names, columns, name)
    if not chosen:
        hint = "Name them, as --columns instruction=question." if task else _naming(rows[0][0], name.partition(" ")[0])
        raise DataError(f"{name}: the columns are {_listed(names)}; expected {KNOWN_COLUMNS}. {hint}")
    if group_field is not None and group_field not in names:
        raise DataError(
            f"{name}: no column {group_field!r}; expected one of {_listed(names)}. Correct data.group_field."
        )
    field = group_field or (GROUP_FIELD if task else "")
    records = []
    for number, (row, opening, place), where, content in _readable(rows, chosen, name):
        if row.get(field) is not None:
            group = parse_text(str(row[field]), field, where)
        elif group_field:
            raise DataError(f"{where}: {group_field} is missing; expected a value (data.group_field). Fill it in.")
        else:
            # A text file's opening, not its path, stands for it: a corpus that moves is divided as before.
            group = content_group(content if task or opening is None else PlainText(opening))
        named = (row.get(one) for one in (TASK_FIELDS if task else ()))
        own = parse_text(str(next((one for one in named if one is not None), task)), "task", where)
        records.append(Record(f"{name}#{number}", group, content, _others(row, chosen, content), own, place))
    return records


def _readable(
    rows: Sequence[OwnedRow], columns: Mapping[str, str], name: str
) -> Iterator[tuple[int, OwnedRow, str, Content]]:
    """Yield the number of each row, counting from 1, the row, its name in messages and its content.

    Rows that are not text are skipped, and counted in the log at the end.

    Raises:
        DataError: No row is text, or one is malformed.
    """
    skipped = list[UnsupportedRecordError]()
    for number, owned in enumerate(rows, start=1):
        row = owned[0]
        where = owned[2] or f"{name}, record {number}"
        try:
            require_text_only(row, where)
            content = parse_content({ours: row.get(theirs) for ours, theirs in columns.items()}, where)
        except UnsupportedRecordError as error:
            skipped.append(error)
            continue
        yield number, owned, where, content
    if len(skipped) == len(rows):
        raise DataError(
            f"{name}: all {len(skipped)} records have parts that are not text; expected one of text. Add such records."
        )
    if skipped:
        logger.warning(
            "%s: skipped %d of %d records, which have image, audio or other parts that are not text. The first is %s.",
            name,
            len(skipped),
            len(rows),
            str(skipped[0]).partition("; expected")[0],
        )


def _others(row: Row, columns: Mapping[str, str], content: Content) -> tuple[str, ...]:
    """Return the columns of a row that have a value and are no part of its content."""
    read = {theirs for ours, theirs in columns.items() if isinstance(content, Chat) or ours not in CHAT_COLUMNS}
    return tuple(column for column, value in row.items() if value not in (None, []) and column not in read)


class _Source(NamedTuple):
    """A source, with the arguments of :func:`load_records` that choose its rows."""

    path: str
    name: str
    files: Sequence[Path] | None
    """Its local files; None for a dataset of the hub."""
    config: str | None
    split: str

    @property
    def place(self) -> Path:
        """The id on the hub, or the path."""
        return Path(self.path).expanduser()

    def read(self) -> tuple[list[str], list[OwnedRow]]:
        """Return the column names and the rows, every row with all columns.

        Raises:
            DataError: The source cannot be read, or is empty.
        """
        try:
            by_split = self._files_by_split()
            rows = self._table_rows() if by_split is None else self._rows_of_files(by_split)
        except UNREADABLE as error:
            cause = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.name[:200]}: cannot be read ({cause}); expected well-formed files, whose split is `train`, or "
                "a dataset of the hub with that split. Repair it, or check the spelling, the split and the network."
            ) from error
        names = dict.fromkeys(name for row, *_ in rows for name in row)
        if not names:
            raise DataError(f"{self.name}: no record; expected at least one. Remove the source, or check its split.")
        return list(names), [(dict.fromkeys(names) | row, opening, place) for row, opening, place in rows]

    def _table_rows(self) -> list[OwnedRow]:
        """Read a dataset of the hub or a directory by its own builder, and other files as Parquet."""
        if is_saved(self.place):
            whole = datasets.load_from_disk(str(self.place))
            splits = whole if isinstance(whole, datasets.DatasetDict) else {"train": whole}
            table = datasets.concatenate_datasets(
                [splits[name].select(part) for name, part in _parts(self.split, splits)]
            )
        elif self.files is None or self.place.is_dir():
            table = datasets.load_dataset(str(self.place), self.config, split=self.split)
        else:
            table = datasets.load_dataset("parquet", data_files=[str(file) for file in self.files], split=self.split)
        stream = table.to_iterable_dataset()
        # Images are not decoded: it takes long, and their records are skipped.
        return [(row, None, "") for row in (stream.decode(False) if stream.features else stream)]

    def _files_by_split(self) -> Mapping[str, Sequence[str]] | None:
        """Return the local JSON, CSV or text files of each split, which are read here; None for other sources."""
        files = self.files
        place = self.place
        if files is None or is_saved(place) or KINDS[_suffix(files[0])] == "parquet":
            return None
        if not place.is_dir():
            return {"train": [str(file) for file in files]}
        found = datasets.load_dataset_builder(str(place), self.config).config.data_files or {}
        # By the names that the user gave, without those that were left out.
        ours = {file.resolve(): str(file) for file in files}
        return {
            str(split): [ours[real] for one in some if (real := Path(str(one)).resolve()) in ours]
            for split, some in found.items()
        }

    def _rows_of_files(self, by_split: Mapping[str, Sequence[str]]) -> list[OwnedRow]:
        def every(name: str) -> list[OwnedRow]:
            files = by_split[name]
            return [
                (row, opening, f"{file}, record {number}" * (len(files) > 1))
                for file in files
                for number, (row, opening) in enumerate(_rows_of(file), start=1)
            ]

        if self.split in by_split:
            return every(self.split)
        # A slice, or a split that does not exist.
        whole = {name: every(name) for name in by_split}
        return [one for name, part in _parts(self.split, whole) for one in whole[name][part.start : part.stop]]


def is_saved(directory: Path) -> bool:
    files = DATASETDICT_JSON_FILENAME, DATASET_STATE_JSON_FILENAME, DATASET_INFO_FILENAME
    of_splits, *of_one = ((directory / file).is_file() for file in files)
    return of_splits or all(of_one)


def _parts(split: str, whole: Mapping[str, Sized]) -> list[tuple[str, range]]:
    """Return the splits, and the rows of each, that ``train[1:3]+test`` and the like name."""
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in whole.items()})
    return [(part.splitname, range(part.from_, part.to)) for part in parts]


def _rows_of(file: str) -> list[tuple[Row, str | None]]:
    """Return the rows of a file: of JSON lines or documents, or of a CSV table, or the paragraphs of a text.

    A row of a text comes with the file's first paragraph.

    Raises:
        DataError: The file is damaged.
    """
    suffix = _suffix(Path(file))
    try:
        if file.lower().endswith(".zst") and "zstd" not in fsspec.available_compressions():
            raise ValueError("compressed by Zstandard: pip install zstandard")
        with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig") as stream:
            text = stream.read()
        if KINDS[suffix] == "text":
            paragraphs = [one for one in text.removesuffix("\n").split("\n\n") if one.strip("\n")]
            return [({"text": one}, paragraphs[0]) for one in paragraphs]
        return [(row, None) for row in (_cells(text) if KINDS[suffix] == "csv" else _objects(text))]
    except UNREADABLE as error:
        raise DataError(
            f"{file}: cannot be read ({one_line(error)}); expected a well-formed {suffix} file in UTF-8. Repair it."
        ) from error


def _cells(text: str) -> Iterator[Row]:
    """Yield the rows of a CSV table under the names of its first line; an empty cell is none."""
    csv.field_size_limit(LONGEST_CELL)
    table = csv.DictReader(io.StringIO(text), strict=True)
    try:
        for row in table:
            if None in row or None in row.values():
                raise ValueError("more or fewer cells than the first line names")
            yield {name: cell or None for name, cell in row.items()}
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {table.reader.line_num}: {error}") from error


def _objects(text: str) -> Iterator[Row]:
    """Yield the objects of JSON values that follow one another: objects, or lists of objects."""
    decoder = json.JSONDecoder()
    place = 0
    while first := _NOT_SPACE.search(text, place):
        value, place = decoder.raw_decode(text, first.start())
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"no object: line {text.count(chr(10), 0, place) + 1}")
        yield from entries


def local_files(path: str, name: str) -> list[Path] | None:
    """Return the files that a path names, in order; None for a dataset of the hub.

    Raises:
        DataError: There is no such file, or the files cannot be read as one source.
    """
    where = Path(path).expanduser()
    if is_saved(where):
        return sorted(file for file in where.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
    if where.is_dir():
        inside = sorted(file.relative_to(where) for file in where.rglob("*") if _suffix(file) in KINDS)
        files = [where / file for file in inside if not any(part.startswith(".") for part in file.parts)]
    elif where.exists():
        files = [where]
    elif glob.has_magic(path):
        files = sorted(file for file in map(Path, glob.glob(str(where), recursive=True)) if file.is_file())
    elif _suffix(where) in KINDS or path.startswith(("/", "./", "../", "~")):
        files = []
    else:
        return None
    if not files:
        raise DataError(f"{name}: no such file; expected {KNOWN_FILES}. Check the path.")
    kinds = {KINDS.get(_suffix(file)): file for file in files}
    if None in kinds:
        raise DataError(f"{kinds[None]}: a file of an unknown kind; expected {KNOWN_FILES}. Convert or rename it.")
    if len(kinds) > 1:
        raise DataError(
            f"{name}: files of several kinds ({', '.join(file.name for file in kinds.values())}); expected one. Name "
            "those of each kind by a glob, such as 'directory/**/*.jsonl', in a source of their own."
        )
    return files


def _suffix(file: Path) -> str:
    """Return the suffix of a file's format, without a suffix of compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSIONS), "")


def _format_of(names: Sequence[str], given: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the columns of a source's one format; none if they fit no format.

    Raises:
        DataError: A given column does not exist, or the columns fit several formats.
    """
    for ours, theirs in given.items():
        if ours not in COLUMNS:
            raise DataError(f"{name}: columns.{ours}: unknown; expected {', '.join(COLUMNS)}. Correct the name.")
        if theirs not in names:
            raise DataError(
                f"{name}: columns.{ours} is {theirs!r}; expected one of {_listed(names)}. Correct the name."
            )
    known = dict(given)
    for ours in COLUMNS:
        for theirs in (ours, OTHER_NAMES.get(ours, ours)):
            if theirs in names and theirs not in given.values():
                known.setdefault(ours, theirs)
    found = [one for one, (first, *_) in FORMATS.items() if first in known]
    if "instruction" in found and "output" not in known and "instruction" not in given:
        found.remove("instruction")
    if not given.keys().isdisjoint(chain.from_iterable(FORMATS[one] for one in found)):
        found = [one for one in found if not given.keys().isdisjoint(FORMATS[one])]
    elif len(found) > 1 and "response" not in known and "prompt_response" in found:
        # Prompts alone beside chats or texts, which contain them.
        found.remove("prompt_response")
    if len(found) > 1:
        raise DataError(
            f"{name}: columns of several formats ({', '.join(found)}); expected one. Name those to read in columns."
        )
    columns = (*FORMATS[found[0]], *CHAT_COLUMNS) if found else ()
    return {ours: known[ours] for ours in columns if ours in known}


def _naming(row: Row, field: str) -> str:
    """Return the hint for a source in other columns: names that make a chat of them, as served prompts are one."""
    texts = [name for name, value in row.items() if isinstance(value, str)]
    turns = {ours: name for ours, part in QUESTION_AND_ANSWER.items() for name in [*filter(part.search, texts)][:1]}
    columns = json.dumps(turns or {"instruction": "COLUMN"}, ensure_ascii=False)
    return f"Add {shlex.quote(f'{field}.columns={columns}')}, and the chat template writes them."


def _listed(columns: Sequence[str]) -> str:
    names = ", ".join(map(repr, columns))
    return names if len(names) <= 400 else f"{names[:397]}..."
