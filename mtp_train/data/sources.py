"""Read records from a local file or a dataset of the hub, through the `datasets` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import datasets

from mtp_train.data.records import Content, PlainText, PromptResponse, Record, content_group, parse_messages, parse_text
from mtp_train.errors import DataError

Format = Literal["auto", "messages", "prompt_response", "text"]

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
MESSAGE_COLUMNS = ("messages", "conversations")
RESPONSE_COLUMNS = ("response", "completion")
KNOWN_COLUMNS = "`messages` or `conversations`, `prompt` with `response` or `completion`, or `text`"


def load_records(
    path: str,
    *,
    split: str = "train",
    format: Format = "auto",
    group_field: str | None = None,
    name: str | None = None,
    max_records: int | None = None,
) -> list[Record]:
    """Read one source.

    Args:
        path: A local .json, .jsonl, .parquet or .txt file (paragraphs, parted by blank lines, are its records), or
            the id of a dataset on the hub.
        split: A split of the dataset, slices allowed (``train[:1000]``). A local file has the one split ``train``.
        format: How to read the columns; ``auto`` goes by their names.
        group_field: The column whose value groups records; None groups records that repeat a prompt.
        name: What to call the source in record ids and messages; the path where it is None.
        max_records: Read no more than the first ``max_records``.

    Raises:
        DataError: There is no such file or dataset, it is empty, its columns are of no format or of several, or a
            record is malformed.
    """
    name = name or path
    table = _read(path, split, name)
    columns = _content_columns(table.column_names, format, name)
    if group_field is not None and group_field not in table.column_names:
        raise DataError(
            f"{name}: no column {group_field!r}, the columns are {_listed(table.column_names)}; expected "
            "data.group_field to name a column. Correct it, or leave it out."
        )
    num_records = len(table) if max_records is None else min(max_records, len(table))
    wanted = list(dict.fromkeys([*columns, *([group_field] if group_field else [])]))
    records = []
    for number, row in enumerate(table.select_columns(wanted).select(range(num_records)), start=1):
        where = f"{name}, record {number}"
        content = _parse_content(row, columns, where)
        group = content_group(content) if group_field is None else _parse_group(row[group_field], group_field, where)
        records.append(Record(id=f"{name}#{number}", group=group, content=content))
    return records


def _read(path: str, split: str, name: str) -> datasets.Dataset:
    file = Path(path).expanduser()
    suffix = file.suffix.lower()
    is_local = file.exists() or suffix in BUILDERS or path.startswith(("/", "./", "../", "~"))
    if is_local:
        _check_file(file, name)
    try:
        # The hub's ids are read by their own builders; a local file by that of its suffix.
        if not is_local:
            table = datasets.load_dataset(path, split=split)
        elif suffix == ".txt":
            table = datasets.load_dataset("text", data_files=str(file), split=split, sample_by="paragraph")
        else:
            table = datasets.load_dataset(BUILDERS[suffix], data_files=str(file), split=split)
    # The JSON builder lets StopIteration out on a file without a row.
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        if is_local and file.read_bytes().strip() in (b"", b"[]"):
            raise _empty(name) from error
        raise _unreadable(name, file if is_local else None, error) from error
    if len(table) == 0:
        raise _empty(name)
    return table


def _check_file(file: Path, name: str) -> None:
    if not file.exists():
        raise DataError(f"{name}: no such file; expected a .json, .jsonl, .parquet or .txt file. Check data.sources.")
    if file.is_dir():
        raise DataError(f"{name}: a directory; expected a file. List its files one by one in data.sources.")
    if file.suffix.lower() not in BUILDERS:
        raise DataError(
            f"{name}: a file of an unknown kind; expected .json, .jsonl, .parquet or .txt. Convert or rename it."
        )


def _empty(name: str) -> DataError:
    return DataError(f"{name}: no record; expected at least one. Remove the source, or check its split.")


def _unreadable(name: str, file: Path | None, error: Exception) -> DataError:
    """Word the failure of a load; for JSON lines, name the line that is at fault."""
    cause = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]
    if file is None:
        return DataError(
            f"{name}: cannot be read ({cause}); expected a local file, or a dataset of the hub with that split. Check "
            "the spelling, the split and the network."
        )
    line = _first_bad_line(file) if file.suffix.lower() == ".jsonl" else None
    where = name if line is None else f"{name}, line {line}"
    return DataError(
        f"{where}: cannot be read ({cause}); expected a well-formed {file.suffix.lower()} file, whose one split is "
        "`train`. Repair the file, or correct the split."
    )


def _first_bad_line(file: Path) -> int | None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                is_object = not line.strip() or isinstance(json.loads(line), dict)
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
            f"{name}: columns of several formats ({', '.join(found)}); expected one. Say which with the source's "
            "`format`, or part the records by format."
        )
    return next(iter(found.values()))


def _parse_content(row: dict[str, object], columns: tuple[str, ...], where: str) -> Content:
    values = [row[column] for column in columns]
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
    return str(value)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(repr(column) for column in columns)
