"""Read records from local files or a dataset of the hub.

JSON and text files are read here: JSON line by line or as one document, text by paragraphs. Everything else goes
through the builders of the ``datasets`` library. :func:`load_records` returns checked records, :func:`load_rows` plain
rows.
"""

from __future__ import annotations

import glob
import json
import logging
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Literal

import datasets
import fsspec
import pyarrow
import pyarrow.compute
from datasets.packaged_modules.json.json import Json as JsonBuilder

from mtp_train.data.records import (
    MEDIA_COLUMNS,
    Content,
    PlainText,
    PromptResponse,
    Record,
    content_group,
    parse_messages,
    parse_text,
    require_text_only,
)
from mtp_train.errors import DataError, UnsupportedRecordError

logger = logging.getLogger(__name__)

BYTE_ORDER_MARK = "\ufeff"
MAX_NESTING = 64
"""Most levels of lists and objects in a record. Deeper ones exhaust the stack of those who walk them."""
UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    datasets.exceptions.DatasetsError,
)
"""The errors of damaged files: of the file system, the decoders, the decompressors and ``datasets``."""

Row = dict[str, Any]
Files = Mapping[str, Sequence[str]]
"""The files of each split."""


def read_json(files: Files, split: str, max_rows: int | None, *, streaming: bool) -> tuple[list[str], Iterable[Row]]:
    """Return the column names and the rows of JSON files, every row with all columns.

    A file holds JSON lines, or one document: a list of objects, or one object.

    Args:
        files: The files of each split.
        split: Which rows; slices are allowed where they are not streamed.
        max_rows: Return no more than the first ``max_rows``.
        streaming: Whether to read only these rows. Otherwise every row of the split is checked.

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
    """Return whether a row is a line or a whole file, judged by the first line that is not blank."""
    (first, *_), *_ = files.values()
    lines = _texts({"train": [first]}, "line", split="train", streaming=True)
    line = next((row["text"] for row in lines if row["text"].strip()), "{}")
    try:
        return "line" if isinstance(_parsed(line.lstrip(BYTE_ORDER_MARK)), dict) else "document"
    except ValueError:
        return "document"


def _texts(files: Files, unit: str, *, split: str | None = None, streaming: bool = False) -> Any:
    """Load files as texts in a column ``text``: one split, or all splits by name."""
    named = {name: list(paths) for name, paths in files.items()}
    return datasets.load_dataset("text", data_files=named, sample_by=unit, split=split, streaming=streaming)


def _objects(texts: Iterable[Row]) -> Iterator[Row]:
    number = 0
    for row in texts:
        text = row["text"].strip().removeprefix(BYTE_ORDER_MARK)
        if not text:
            continue
        value = _parsed(text)
        for entry in value if isinstance(value, list) else [value]:
            number += 1
            if not isinstance(entry, dict):
                raise ValueError(f"record {number} is not an object")
            yield entry


def _parsed(text: str | bytes) -> Any:
    """Parse JSON of at most ``MAX_NESTING`` levels.

    Raises:
        ValueError: The text is not JSON, or is nested deeper.
    """
    # A document is a list of records: one more level.
    too_deep = f"more than {MAX_NESTING} levels of lists and objects"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return value
    raise ValueError(too_deep)


def _filled(rows: Iterable[Row], names: Sequence[str]) -> Iterator[Row]:
    empty = dict.fromkeys(names)
    return ({**empty, **row} for row in rows)


Format = Literal["auto", "messages", "prompt_response", "text"]

MAX_LISTED = 30
"""Most columns that a message lists."""
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KNOWN_FILES = "a .json, .jsonl, .parquet or .txt file (.gz, .xz, .bz2 or .zst too)"
SMALL_FILE_BYTES = 64
TEXT_BLOCK_CHARS = 1 << 20
ARROW_ROWS = 1024
"""Rows of a column that are examined at a time."""
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
MESSAGE_COLUMNS = ("messages", "conversations")
RESPONSE_COLUMNS = ("response", "completion")
KNOWN_COLUMNS = "`messages` or `conversations`, `prompt` with `response` or `completion`, or `text`"


def load_records(
    path: str,
    *,
    config: str | None = None,
    split: str = "train",
    format: Format = "auto",
    group_field: str | None = None,
    name: str | None = None,
    max_records: int | None = None,
    streaming: bool = False,
) -> list[Record]:
    """Read one source.

    Args:
        path: A local .json, .jsonl, .parquet or .txt file (its paragraphs, separated by blank lines, are the records),
            plain or compressed; a directory or a glob of files of one kind; or the id of a dataset on the hub.
        config: The configuration of a dataset on the hub, or of a directory that defines some.
        split: A split of the dataset, slices allowed (``train[:1000]``). A local file has one split, ``train``; in a
            directory the file names define the splits.
        format: The columns to read; ``auto`` chooses by their names.
        group_field: The column whose value groups records. None groups by content (:func:`content_group`), and the
            paragraphs of a .txt file by their file.
        name: Name of the source in record ids and messages; None uses the path.
        max_records: Read no more than the first ``max_records``.
        streaming: Whether to read only the requested records, without a copy in the cache.

    Raises:
        DataError: There is no such file or dataset, it is empty, its columns fit no format or several, or a record is
            malformed.
    """
    name = name or path
    files = local_files(path, name)
    if files is not None and config is not None and not Path(path).expanduser().is_dir():
        raise DataError(f"{name}: config {config!r} of local files; expected null, as they have none. Leave it out.")
    names, rows, owners = _read(path, files, config, split, name, max_records, streaming)
    columns = _content_columns(names, format, name)
    if group_field is not None and group_field not in names:
        raise DataError(
            f"{name}: no column {group_field!r}, the columns are {_listed(names)}; expected "
            "data.group_field to name a column. Correct it, or leave it out."
        )
    if isinstance(rows, datasets.Dataset):
        rows = _selected(rows, list(dict.fromkeys([*columns, *([group_field] if group_field else [])])))
    records = []
    skipped = Skipped(name)
    for number, row in enumerate(_readable(rows, name, files), start=1):
        where = f"{name}, record {number}"
        try:
            require_text_only(row, where)
            content = _parse_content(row, columns, where)
        except UnsupportedRecordError as error:
            skipped.add(error)
            continue
        if group_field is not None:
            group = _parse_group(row.get(group_field), group_field, where)
        else:
            group = content_group(content) if owners is None else owners[number - 1]
        records.append(Record(id=f"{name}#{number}", group=group, content=content))
    skipped.report(len(records))
    return records


class Skipped:
    """Count the records of a source that are skipped because they are not text.

    Args:
        name: Name of the source in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors: list[UnsupportedRecordError] = []

    def add(self, error: UnsupportedRecordError) -> None:
        """Count one record."""
        self.errors.append(error)

    def report(self, num_used: int) -> None:
        """Log the number of skipped records and the first one.

        Raises:
            DataError: No record is left.
        """
        if not self.errors:
            return
        if not num_used:
            raise DataError(
                f"{self.name}: all {len(self.errors)} records have image, audio or other parts that are not text; "
                "expected at least one record of text. Add text records, or use another source."
            )
        logger.warning(
            "%s: skipped %d of %d records, which have image, audio or other parts that are not text. The first is %s.",
            self.name,
            len(self.errors),
            len(self.errors) + num_used,
            str(self.errors[0]).partition("; expected")[0],
        )


def _selected(table: datasets.Dataset, columns: list[str]) -> Iterator[Row]:
    """Yield the rows with these columns, and with the media columns as whether they hold something.

    Other columns are not read: images take long to decode.
    """
    media = [column for column in MEDIA_COLUMNS if column in table.column_names and column not in columns]
    held = zip(*(_holds(table, column) for column in media), strict=True) if media else repeat(())
    for row, flags in zip(table.select_columns(columns), held, strict=False):
        yield {**row, **dict(zip(media, flags, strict=True))}


def _holds(table: datasets.Dataset, column: str) -> Iterator[bool]:
    """Yield for every row whether the column is neither null nor an empty list. Decodes nothing."""
    for batch in table.select_columns([column]).with_format("arrow").iter(batch_size=ARROW_ROWS):
        values = batch[column]
        is_list = pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type)
        known = pyarrow.compute.list_value_length(values) if is_list else values.is_valid()
        yield from (bool(one) for one in known.to_pylist())


def load_rows(
    path: str, *, config: str | None = None, split: str = "train", name: str | None = None
) -> list[dict[str, Any]]:
    """Read the rows of one source with its columns as they are.

    Args:
        path: As for :func:`load_records`.
        config: The configuration of a dataset on the hub; local files have none.
        split: The split of a dataset on the hub or of a directory; a local file has one split, ``train``.
        name: Name of the source in messages; None uses the path.

    Raises:
        DataError: There is no such file or dataset, it is empty, or it cannot be read.
    """
    name = name or path
    files = local_files(path, name)
    if files is not None:
        config, split = None, split if Path(path).expanduser().is_dir() else "train"
    return list(_readable(_read(path, files, config, split, name, None, False)[1], name, files))


def _readable(rows: Iterable[Row], name: str, files: Sequence[Path] | None) -> Iterator[Row]:
    """Yield rows, some of which are decoded only now.

    Raises:
        DataError: A row cannot be decoded.
    """
    try:
        yield from rows
    except UNREADABLE as error:
        raise _unreadable(name, files, error) from error


def _read(
    path: str,
    files: Sequence[Path] | None,
    config: str | None,
    split: str,
    name: str,
    max_records: int | None,
    streaming: bool,
) -> tuple[list[str], Iterable[dict[str, Any]], list[str] | None]:
    """Return the column names, the rows, and for text files the file of each row."""
    try:
        if files is not None and BUILDERS[_suffix(files[0])] == "text":
            pairs = list(islice(_paragraphs(path, files, config, split), max_records))
            if not pairs:
                raise _empty(name)
            return ["text"], [{"text": text} for text, _ in pairs], [owner for _, owner in pairs]
        json_files = _json_files(path, files, config)
        if json_files is not None:
            names, rows = read_json(json_files, split, max_records, streaming=streaming)
            num_rows = len(names)
        elif isinstance(table := _open(path, files, config, split, streaming), datasets.IterableDataset):
            rows = list(islice(table, max_records))
            names, num_rows = list(rows[0]) if rows else [], len(rows)
        else:
            names, num_rows = table.column_names, len(table)
            rows = table if max_records is None else table.select(range(min(max_records, num_rows)))
    # The JSON builder of `datasets` raises StopIteration on a file without a row.
    except (*UNREADABLE, StopIteration) as error:
        if files is not None and all(_is_empty(file) for file in files):
            raise _empty(name) from error
        raise _unreadable(name, files, error) from error
    if num_rows == 0:
        raise _empty(name)
    return names, rows, None


def _paragraphs(path: str, files: Sequence[Path], config: str | None, split: str) -> Iterator[tuple[str, str]]:
    """Yield every paragraph of a split of text files, with its file."""
    by_split = {"train": list(files)}
    where = Path(path).expanduser()
    if where.is_dir():
        found = datasets.load_dataset_builder(str(where), config, sample_by="paragraph").config.data_files
        ours = {file.resolve(): file for file in files}
        resolved = {str(one): [Path(file).resolve() for file in found[one]] for one in found}
        by_split = {one: [ours[file] for file in some if file in ours] for one, some in resolved.items()}
    if split in by_split:
        return _owned_paragraphs(by_split[split])
    # A slice, or a split that does not exist.
    every = {one: list(_owned_paragraphs(some)) for one, some in by_split.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({one: len(pairs) for one, pairs in every.items()})
    return (pair for part in parts for pair in every[part.splitname][part.from_ : part.to])


def _owned_paragraphs(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    return ((text, str(file)) for file in files for text in _paragraphs_of(file))


def _paragraphs_of(file: Path) -> Iterator[str]:
    """Yield the paragraphs of a text file, separated by blank lines. Reads the file in blocks."""
    if file.suffix.lower() == ".zst" and "zstd" not in fsspec.available_compressions():
        raise ValueError("zstd is not installed")
    with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8") as stream:
        rest = ""
        while block := stream.read(TEXT_BLOCK_CHARS):
            *whole, rest = (rest + block).split("\n\n")
            yield from (text for text in whole if text.strip("\n"))
        if rest.strip("\n"):
            yield rest


def _json_files(path: str, files: Sequence[Path] | None, config: str | None) -> Files | None:
    """Return the files of each split if they are JSON without a configured ``field`` for the rows, else None."""
    where = Path(path).expanduser()
    if files is not None and not where.is_dir():
        return {"train": [str(file) for file in files]} if BUILDERS[_suffix(files[0])] == "json" else None
    if files is not None and BUILDERS[_suffix(files[0])] != "json":
        return None
    builder = datasets.load_dataset_builder(path if files is None else str(where), config)
    return builder.config.data_files if isinstance(builder, JsonBuilder) and builder.config.field is None else None


def _open(
    path: str, files: Sequence[Path] | None, config: str | None, split: str, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """Open a dataset of the hub or a directory by its own builder, and other files than text by the builder of their
    kind."""
    if files is None:
        return datasets.load_dataset(path, config, split=split, streaming=streaming)
    where = Path(path).expanduser()
    if where.is_dir():
        return datasets.load_dataset(str(where), config, split=split, streaming=streaming)
    names = [str(file) for file in files]
    kind = BUILDERS[_suffix(files[0])]
    return datasets.load_dataset(kind, data_files=names, split=split, streaming=streaming)


def local_files(path: str, name: str) -> list[Path] | None:
    """Return the files that a path names, in order; None for a dataset of the hub.

    Raises:
        DataError: There is no such file, or the files cannot be read as one source.
    """
    where = _place(path, name)
    if where.is_dir():
        _refuse_script(where, name)
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
    for file in files:
        # Opening a FIFO waits for a writer, and reading a device may never end.
        if not file.is_file():
            raise DataError(
                f"{file}: not a regular file; expected {KNOWN_FILES}. Remove it, or write the records to a file."
            )
    kinds = {BUILDERS.get(_suffix(file)): file for file in files}
    if None in kinds:
        raise DataError(f"{kinds[None]}: a file of an unknown kind; expected {KNOWN_FILES}. Convert or rename it.")
    if len(kinds) > 1:
        raise DataError(
            f"{name}: files of several kinds ({', '.join(file.name for file in kinds.values())}); expected one. Name "
            "those of one kind by a glob, such as 'directory/**/*.jsonl', and the others in a source of their own."
        )
    return files


def _place(path: str, name: str) -> Path:
    """Return the path of a source with ``~`` expanded.

    Raises:
        DataError: No file system can have such a path.
    """
    try:
        where = Path(path).expanduser()
        where.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return where
    except (OSError, ValueError, RuntimeError) as error:
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{name[:60]!a}: cannot be opened ({found}); expected {KNOWN_FILES}. Check the path.") from None
    return where


def _refuse_script(directory: Path, name: str) -> None:
    """Refuse a directory with a dataset script: some versions of ``datasets`` run it, others refuse all its files."""
    script = directory / f"{directory.resolve().name}.py"
    if script.exists():
        raise DataError(
            f"{name}: contains the dataset script {script.name}, which is never run; expected files of records alone. "
            "Remove the script, or name the files by a glob."
        )


def _suffix(file: Path) -> str:
    """Return the suffix of a file's format, without a suffix of compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSIONS), "")


def _empty(name: str) -> DataError:
    return DataError(f"{name}: no record; expected at least one. Remove the source, or check its split.")


def _is_empty(file: Path) -> bool:
    return file.stat().st_size < SMALL_FILE_BYTES and file.read_bytes().strip() in (b"", b"[]")


def _unreadable(name: str, files: Sequence[Path] | None, error: Exception) -> DataError:
    """Return the error for a source that cannot be read; for JSON lines it names the faulty line."""
    cause = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    if files is None:
        return DataError(
            f"{name[:200]}: cannot be read ({cause}); expected a local file, or a dataset of the hub with that split. "
            "Check the spelling, the split and the network."
        )
    if "zstd" in cause:
        return DataError(f"{name}: compressed by Zstandard; expected the package that reads it. pip install zstandard.")
    for file in files:
        line = _first_bad_line(file) if file.suffix.lower() == ".jsonl" else None
        if line is not None:
            name = f"{name if len(files) == 1 else file}, line {line}"
            break
    return DataError(
        f"{name}: cannot be read ({cause}); expected a well-formed {_suffix(files[0])} file, whose one split is "
        "`train`. Repair the file, or correct the split."
    )


def _first_bad_line(file: Path) -> int | None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                is_object = not line.strip() or isinstance(_parsed(line), dict)
            except ValueError:
                is_object = False
            if not is_object:
                return number
    return None


def _content_columns(columns: Sequence[str], format: Format, name: str) -> tuple[str, ...]:
    """Return the columns that hold the content: one of messages, a prompt and a response, or one of text."""
    found: dict[str, tuple[str, ...]] = {}
    messages = [column for column in MESSAGE_COLUMNS if column in columns]
    responses = [column for column in RESPONSE_COLUMNS if column in columns]
    if messages:
        found["messages"] = (messages[0],)
    if "prompt" in columns and responses:
        found["prompt_response"] = ("prompt", responses[0])
    if "text" in columns:
        found["text"] = ("text",)
    if format != "auto":
        if format not in found:
            raise DataError(
                f"{name}: the columns are {_listed(columns)}, without those of format {format!r}; expected "
                f"{KNOWN_COLUMNS}. Rename a column, or correct the source's format."
            )
        return found[format]
    if not found:
        raise DataError(
            f"{name}: the columns are {_listed(columns)}; expected {KNOWN_COLUMNS}. Rename a column, or "
            "convert the data."
        )
    if len(found) > 1:
        raise DataError(
            f"{name}: columns of several formats ({', '.join(found)}); expected one. Choose it by the source's "
            "`format`, or separate the records by format."
        )
    return next(iter(found.values()))


def _parse_content(row: dict[str, object], columns: tuple[str, ...], where: str) -> Content:
    values = [row.get(column) for column in columns]
    if columns[0] in MESSAGE_COLUMNS:
        return parse_messages(values[0], where)
    texts = [parse_text(value, column, where) for value, column in zip(values, columns, strict=True)]
    return PromptResponse(*texts) if len(texts) == 2 else PlainText(texts[0].strip("\n"))


def _parse_group(value: object, group_field: str, where: str) -> str:
    if value is None:
        raise DataError(
            f"{where}: {group_field} is missing; expected a value in every record (data.group_field). Fill it in, or "
            "leave data.group_field out."
        )
    return parse_text(str(value), group_field, where)


def _listed(columns: Sequence[str]) -> str:
    names = [repr(column) if len(column) <= 60 else f"{column[:57]!r}..." for column in columns[:MAX_LISTED]]
    return ", ".join([*names, f"and {len(columns) - MAX_LISTED} more"] if len(columns) > MAX_LISTED else names)
