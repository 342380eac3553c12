"""Read records from local files or a dataset of the hub.

JSON, CSV and text files are read here: ``datasets`` turns text that looks like a date or a number into one, and does
not tell which file a paragraph is from. Everything else goes through the builders of ``datasets``. :func:`load_records`
returns checked records, :func:`load_rows` plain rows.
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import lzma
import re
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO, TypeVar

import datasets
import fsspec
from datasets.config import DATASET_INFO_FILENAME, DATASET_STATE_JSON_FILENAME, DATASETDICT_JSON_FILENAME
from datasets.packaged_modules.json.json import Json as JsonBuilder

from mtp_train.data.records import (
    Chat,
    Content,
    PlainText,
    Record,
    content_group,
    json_or_text,
    parse_content,
    parse_text,
    parsed_json,
    require_text_only,
    require_utf8,
)
from mtp_train.errors import DataError, UnsupportedRecordError

logger = logging.getLogger(__name__)

UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    zlib.error,
    csv.Error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    datasets.exceptions.DatasetsError,
)
"""The errors of damaged files: of the file system, the decoders, the decompressors and ``datasets``."""
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KNOWN_FILES = "a .json, .jsonl, .csv, .parquet or .txt file (.gz, .xz, .bz2 or .zst too)"
TEXT_BLOCK_CHARS = 1 << 20
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_response": ("prompt", "response"),
    "instruction": ("instruction", "input", "output"),
    "text": ("text",),
}
"""The columns of each format; a record has at least the first."""
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
    "`messages` or `conversations`, `prompt` (with `response` or `completion`), `instruction` with `output`, or `text`"
)

Row = dict[str, Any]
Given = TypeVar("Given")
Found = TypeVar("Found")
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
        raise DataError(
            f"{name}: the columns are {_listed(names)}; expected {KNOWN_COLUMNS}. "
            f"{_naming(next(iter(rows))[0], name.partition(' ')[0])}"
        )
    if group_field is not None and group_field not in names:
        raise DataError(
            f"{name}: no column {group_field!r}; expected one of {_listed(names)}. Correct data.group_field."
        )
    records = []
    found = read_each(rows, name, lambda owned, where: read_content(owned[0], chosen, owned[2] or where))
    for number, (row, opening, place), (content, others) in found:
        where = place or f"{name}, record {number}"
        if not group_field:
            # A text file's opening, not its path, stands for it: a corpus that moves is divided as before.
            group = content_group(content if opening is None else PlainText(opening))
        elif row.get(group_field) is None:
            raise DataError(f"{where}: {group_field} is missing; expected a value (data.group_field). Fill it in.")
        else:
            group = parse_text(str(row[group_field]), group_field, where)
        records.append(Record(f"{name}#{number}", group, content, others, place=place))
    return records


def load_rows(path: str, *, config: str | None = None, split: str = "train", name: str | None = None) -> list[Row]:
    """Read the rows of one source with its columns as they are.

    Args:
        config: The configuration of a dataset on the hub; local files have none.
        split: The split of a dataset on the hub or of a directory; a local file has one split, ``train``.
    """
    name = name or path
    files = local_files(path, name)
    if files is not None:
        config, split = None, split if Path(path).expanduser().is_dir() else "train"
    return [row for row, *_ in _Source(path, name, files, config, split).read()[1]]


def read_each(
    rows: Iterable[Given], name: str, read: Callable[[Given, str], Found]
) -> Iterator[tuple[int, Given, Found]]:
    """Yield the number of each row, counting from 1, the row and what ``read`` makes of it.

    Rows that are not text are skipped, and counted in the log at the end.

    Raises:
        DataError: No row is text, or ``read`` refuses one.
    """
    skipped, num_used = list[UnsupportedRecordError](), 0
    for number, row in enumerate(rows, start=1):
        try:
            found = read(row, f"{name}, record {number}")
        except UnsupportedRecordError as error:
            skipped.append(error)
            continue
        num_used += 1
        yield number, row, found
    if skipped and not num_used:
        raise DataError(
            f"{name}: all {len(skipped)} records have parts that are not text; expected one of text. Add such records."
        )
    if skipped:
        logger.warning(
            "%s: skipped %d of %d records, which have image, audio or other parts that are not text. The first is %s.",
            name,
            len(skipped),
            len(skipped) + num_used,
            str(skipped[0]).partition("; expected")[0],
        )


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

    def read(self) -> tuple[list[str], Iterator[OwnedRow]]:
        """Return the column names and the rows, some of which are decoded only when they are asked for.

        Raises:
            DataError: The source cannot be read, or is empty.
        """
        with self._unreadable_is_named():
            by_split = self._files_by_split()
            names, rows = self._read_table() if by_split is None else self._read_files(by_split)
        if not names:
            raise DataError(f"{self.name}: no record; expected at least one. Remove the source, or check its split.")
        return names, self._decoded(rows)

    def _decoded(self, rows: Iterable[OwnedRow]) -> Iterator[OwnedRow]:
        with self._unreadable_is_named():
            yield from rows

    @contextmanager
    def _unreadable_is_named(self) -> Iterator[None]:
        """Raise a DataError for a source that cannot be read; it names the file, and the line where it is known."""
        try:
            yield
        except UNREADABLE as error:
            cause = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
            name, files = self.name, self.files
            if files is None:
                raise DataError(
                    f"{name[:200]}: cannot be read ({cause}); expected a local file, or a dataset of the hub with that "
                    "split. Check the spelling, the split and the network."
                ) from error
            if "zstd" in cause:
                raise DataError(
                    f"{name}: compressed by Zstandard; expected the package that reads it. pip install zstandard."
                ) from error
            if isinstance(error, _BadPlaceError):
                file, place, cause = error.args
                name = f"{name if len(files) == 1 else file}{place}"
            raise DataError(
                f"{name}: cannot be read ({cause}); expected a well-formed {_suffix(files[0])} file, whose one split "
                "is `train`. Repair the file, or correct the split."
            ) from error

    def _read_table(self) -> tuple[list[str], Iterable[OwnedRow]]:
        """Read a dataset of the hub or a directory by its own builder, and other files by the builder of their kind."""
        if is_saved(self.place):
            whole = datasets.load_from_disk(str(self.place))
            splits = whole if isinstance(whole, datasets.DatasetDict) else {"train": whole}
            table = datasets.concatenate_datasets(
                [splits[name].select(part) for name, part in _parts(self.split, splits)]
            )
        elif self.files is None or self.place.is_dir():
            table = datasets.load_dataset(str(self.place), self.config, split=self.split)
        else:
            table = datasets.load_dataset(
                BUILDERS[_suffix(self.files[0])], data_files=[str(file) for file in self.files], split=self.split
            )
        stream = table.to_iterable_dataset()
        # Images are not decoded: it takes long, and their records are skipped.
        rows = iter(stream.decode(False) if stream.features else stream)
        first: Row = next(rows, {})
        return list(first), ((row, None, "") for row in chain([first], rows))

    def _files_by_split(self) -> Mapping[str, Sequence[str]] | None:
        """Return the files of each split if they are read here, else None.

        These are local text and CSV files, and JSON files, local or of the hub, without a ``field`` that has the rows.
        """
        files, place = self.files, self.place
        if files is not None and (is_saved(place) or BUILDERS[_suffix(files[0])] == "parquet"):
            return None
        if files is not None and not place.is_dir():
            return {"train": [str(file) for file in files]}
        builder = datasets.load_dataset_builder(str(place), self.config)
        is_json = isinstance(builder, JsonBuilder)
        if (files is None and not is_json) or (is_json and builder.config.field is not None):
            return None
        found = {str(split): list(map(str, some)) for split, some in (builder.config.data_files or {}).items()}
        if files is not None:
            # By the names that the user gave, without those that were left out.
            ours = {file.resolve(): str(file) for file in files}
            return {
                split: [ours[real] for one in some if (real := Path(one).resolve()) in ours]
                for split, some in found.items()
            }
        return {split: datasets.DownloadManager().download_and_extract(some) for split, some in found.items()}

    def _read_files(self, by_split: Mapping[str, Sequence[str]]) -> tuple[list[str], Iterable[OwnedRow]]:
        """Return the column names and the rows of files that are read here, every row with all columns."""

        def every(name: str) -> list[OwnedRow]:
            files = by_split[name]
            return [
                (row, opening, f"{file}, record {number}" * (len(files) > 1))
                for file in files
                for number, (row, opening) in enumerate(_rows_of(file), start=1)
            ]

        if self.split in by_split:
            rows = every(self.split)
        else:
            # A slice, or a split that does not exist.
            whole = {name: every(name) for name in by_split}
            rows = [one for name, part in _parts(self.split, whole) for one in whole[name][part.start : part.stop]]
        names = dict.fromkeys(name for row, *_ in rows for name in row)
        return list(names), ((dict.fromkeys(names) | row, opening, place) for row, opening, place in rows)


def is_saved(directory: Path) -> bool:
    files = DATASETDICT_JSON_FILENAME, DATASET_STATE_JSON_FILENAME, DATASET_INFO_FILENAME
    of_splits, *of_one = ((directory / file).is_file() for file in files)
    return of_splits or all(of_one)


def _parts(split: str, whole: Mapping[str, Sized]) -> list[tuple[str, range]]:
    """Return the splits, and the rows of each, that ``train[1:3]+test`` and the like name."""
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in whole.items()})
    return [(part.splitname, range(part.from_, part.to)) for part in parts]


class _BadPlaceError(ValueError):
    """Report what cannot be read: the file, the place in it, as ``, line 3``, and the cause."""


def _rows_of(file: str) -> Iterator[tuple[Row, str | None]]:
    """Yield the rows of a file: of JSON lines, of one JSON document or of a CSV table, or the paragraphs of a text.

    A row of a text comes with the file's first paragraph.
    """
    try:
        yield from _parsed(file)
    except _BadPlaceError:
        raise
    except UNREADABLE as error:
        raise _BadPlaceError(file, "", error) from error


def _parsed(file: str) -> Iterator[tuple[Row, str | None]]:
    if file.lower().endswith(".zst") and "zstd" not in fsspec.available_compressions():
        raise ValueError("zstd is not installed")
    # Bytes that are not UTF-8 are reported with their line, see require_utf8.
    with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig", errors="surrogateescape") as stream:
        kind = BUILDERS.get(_suffix(Path(file)))
        if kind == "csv":
            yield from ((row, None) for row in _cells(stream, file))
        elif kind == "text":
            opening = ""
            for text in _paragraphs(stream, file):
                opening = opening or text
                yield {"text": text}, opening
        else:
            yield from ((row, None) for row in _objects(stream, file))


def _paragraphs(stream: TextIO, file: str) -> Iterator[str]:
    """Yield the paragraphs of a text, separated by blank lines. Reads in blocks."""
    rest, line = "", 1
    while block := stream.read(TEXT_BLOCK_CHARS):
        try:
            block.encode()
        except UnicodeEncodeError as error:
            line += block.count("\n", 0, error.start)
            raise _BadPlaceError(file, f", line {line}", "not UTF-8") from error
        line += block.count("\n")
        *whole, rest = (rest + block).split("\n\n")
        yield from (text for text in whole if text.strip("\n"))
    if rest.strip("\n"):
        yield rest


def _cells(stream: TextIO, file: str) -> Iterator[Row]:
    """Yield the rows of a CSV table under the names of its first line; an empty cell is none."""
    # A document may be longer than the limit that the module starts with.
    csv.field_size_limit(TEXT_BLOCK_CHARS << 10)
    table = csv.DictReader(stream, strict=True)
    try:
        for row in table:
            if None in row or None in row.values():
                raise ValueError("more or fewer cells than the first line names")
            require_utf8("".join(row.values()))
            yield {name: cell or None for name, cell in row.items()}
    except (ValueError, csv.Error) as error:
        raise _BadPlaceError(file, f", line {table.reader.line_num}", error) from error


def _objects(stream: TextIO, file: str) -> Iterator[Row]:
    """Yield the objects of JSON lines, or of a document: a list of objects, or one object."""
    lines = ((number, line) for number, line in enumerate(stream, start=1) if line.strip())
    first = next(lines, (1, "[]"))
    if isinstance(json_or_text(first[1]), dict):
        for number, line in chain([first], lines):
            try:
                row = parsed_json(line)
            except ValueError as error:
                raise _BadPlaceError(file, f", line {number}", error) from error
            if not isinstance(row, dict):
                raise _BadPlaceError(file, f", line {number}", "no object")
            yield row
        return
    try:
        value = parsed_json(first[1] + stream.read())
    except ValueError as error:
        raise _BadPlaceError(file, f", line {first[0]}" * (_suffix(Path(file)) == ".jsonl"), error) from error
    for number, entry in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(entry, dict):
            raise _BadPlaceError(file, f", record {number}", "no object")
        yield entry


def local_files(path: str, name: str) -> list[Path] | None:
    """Return the files that a path names, in order; None for a dataset of the hub.

    Raises:
        DataError: There is no such file, or the files cannot be read as one source.
    """
    where = _place(path, name)
    if is_saved(where):
        return sorted(file for file in where.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
    if where.is_dir():
        inside = sorted(file.relative_to(where) for file in where.rglob("*") if _suffix(file) in BUILDERS)
        files = [where / file for file in inside if not any(part.startswith(".") for part in file.parts)]
    elif where.exists():
        files = [where]
    elif glob.has_magic(path):
        files = sorted(file for file in map(Path, glob.glob(str(where), recursive=True)) if file.is_file())
    elif _suffix(where) in BUILDERS or path.startswith(("/", "./", "../", "~")):
        files = []
    else:
        return None
    if not files:
        raise DataError(f"{name}: no such file; expected {KNOWN_FILES}. Check the path.")
    kinds = {BUILDERS.get(_suffix(file)): file for file in files}
    if None in kinds:
        raise DataError(f"{kinds[None]}: a file of an unknown kind; expected {KNOWN_FILES}. Convert or rename it.")
    if len(kinds) > 1:
        raise DataError(
            f"{name}: files of several kinds ({', '.join(file.name for file in kinds.values())}); expected one. Name "
            "those of each kind by a glob, such as 'directory/**/*.jsonl', in a source of their own."
        )
    return files


def _place(path: str, name: str) -> Path:
    """Return the path of a source with ``~`` expanded; refuse one that no file can have."""
    try:
        where = Path(path).expanduser()
        where.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{name[:60]!a}: cannot be opened ({error}); expected {KNOWN_FILES}. Check the path.") from None
    return where


def _suffix(file: Path) -> str:
    """Return the suffix of a file's format, without a suffix of compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSIONS), "")


def known_columns(names: Collection[str], given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the columns of ``FORMATS`` and ``CHAT_COLUMNS`` that a source has, with their names there."""
    known = dict(given)
    for ours in COLUMNS:
        for theirs in (ours, OTHER_NAMES.get(ours, ours)):
            if theirs in names and theirs not in given.values():
                known.setdefault(ours, theirs)
    return known


def columns_of(format: str, known: Mapping[str, str]) -> dict[str, str]:
    return {ours: known[ours] for ours in (*FORMATS[format], *CHAT_COLUMNS) if ours in known}


def read_content(row: Row, columns: Mapping[str, str], where: str) -> tuple[Content, tuple[str, ...]]:
    """Return the content of a row, and the other columns that have a value."""
    require_text_only(row, where)
    content = parse_content({ours: row.get(theirs) for ours, theirs in columns.items()}, where)
    read = {theirs for ours, theirs in columns.items() if isinstance(content, Chat) or ours not in CHAT_COLUMNS}
    return content, tuple(column for column, value in row.items() if value not in (None, []) and column not in read)


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
    known = known_columns(names, given)
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
    return columns_of(found[0], known) if found else {}


def _naming(row: Row, field: str) -> str:
    """Return the hint for a source in other columns: names that make a chat of them, as served prompts are one."""
    texts = [name for name, value in row.items() if isinstance(value, str)]
    turns = {ours: name for ours, part in QUESTION_AND_ANSWER.items() for name in [*filter(part.search, texts)][:1]}
    columns = json.dumps(turns or {"instruction": "COLUMN"}, ensure_ascii=False)
    return f"Add {shlex.quote(f'{field}.columns={columns}')}, and the chat template writes them."


def _listed(columns: Sequence[str]) -> str:
    names = ", ".join(map(repr, columns))
    return names if len(names) <= 400 else f"{names[:397]}..."
