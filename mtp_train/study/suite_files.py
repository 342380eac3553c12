"""Prompts from files that users have: those of published benchmarks, and their own.

A benchmark of several turns gives its first turn alone. A later turn needs the model's own answer to those before it,
so that two arms would no longer answer the same prompt. Reference answers are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record, content_group, parse_messages
from mtp_train.data.sources import MESSAGE_COLUMNS, load_rows
from mtp_train.errors import DataError
from mtp_train.report.cells import ALL_TASKS

SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
OWN_FIELDS = "`messages` (a chat), `prompt` (raw text to go on from) or `text` (raw text, continued from its half)"
TASK_FIELDS = ("task", "category")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class SuiteRecord:
    """A record and the task it belongs to."""

    task: str
    record: Record


@dataclass(frozen=True)
class Benchmark:
    """How the files of a published benchmark are read.

    Args:
        fields: What its records hold, for messages.
        hub_config: The configuration of its dataset on the hub.
        split: The split of that dataset, and of a directory.
        read: From a record's fields to its task and its prompt; given where the record stands.
    """

    fields: str
    hub_config: str | None
    split: str
    read: Callable[[Row, str], tuple[str, Content]]


def read_benchmark(kind: str, location: str) -> list[SuiteRecord]:
    """Read a benchmark's file.

    Args:
        kind: A key of :data:`BENCHMARKS`.
        location: A file, a directory of files or the id of a dataset on the hub.

    Raises:
        DataError: There is no such file, it is not that benchmark's, or its texts have still to be fetched.
    """
    name, benchmark = f"{kind}:{location}", BENCHMARKS[kind]
    rows = load_rows(location, config=benchmark.hub_config, split=benchmark.split, name=name)
    records = []
    for number, row in enumerate(rows, start=1):
        where = f"{name}, record {number}"
        try:
            task, content = benchmark.read(row, where)
        except KeyError as missing:
            raise DataError(
                f"{where}: no {missing}, the fields are {_fields(row)}; expected {benchmark.fields}. Check that the "
                f"file is {kind}'s, or write its prompts as a .jsonl of your own."
            ) from None
        records.append(_suite_record(task, content, f"{kind}#{number}", where))
    return records


def read_own(location: str) -> list[SuiteRecord]:
    """Read a file of the user's own: each record a chat, a prompt or a text, and the task it belongs to.

    Of several fields the first of ``messages`` (or ``conversations``), ``prompt`` and ``text`` counts. ``task`` or
    ``category`` names the task; records without belong to the one task that is named after the file.

    Raises:
        DataError: There is no such file, or a record holds none of these.
    """
    stem = Path(location).name.split(".")[0]
    records = []
    for number, row in enumerate(load_rows(location, name=location), start=1):
        where = f"{location}, record {number}"
        task = next((str(row[field]) for field in TASK_FIELDS if row.get(field) is not None), stem)
        records.append(_suite_record(task, _own_content(row, where), f"{stem}#{number}", where))
    return records


def _suite_record(task: str, content: Content, id: str, where: str) -> SuiteRecord:
    if task == ALL_TASKS:
        raise DataError(
            f"{where}: the task {task!r}; expected another name, as reports call all tasks together so. Rename it."
        )
    return SuiteRecord(task, Record(id, content_group(content), content))


def _own_content(row: Row, where: str) -> Content:
    for column in MESSAGE_COLUMNS:
        if row.get(column) is not None:
            return _tidied(parse_messages(row[column], where))
    if row.get("prompt") is not None:
        return PromptResponse(_text(row, "prompt", where), "")
    if row.get("text") is not None:
        return PlainText(_text(row, "text", where))
    raise DataError(f"{where}: the fields are {_fields(row)}; expected {OWN_FIELDS}. Rename a field.")


def _tidied(chat: Chat) -> Chat:
    """Return the chat without white space around what the user says: tokens would hold it and a word together."""
    return Chat(
        tuple(
            {**message, "content": message["content"].strip()} if message["role"] == "user" else message
            for message in chat.messages
        )
    )


def _first_turn(row: Row, where: str) -> tuple[str, Content]:
    turns = _present(row, "turns")
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: turns are {turns!r}; expected a list of texts. Repair the record.")
    return str(_present(row, "category")), _question({"text": turns[0]}, "text", f"{where}, turn 1")


def _speed_bench(row: Row, where: str) -> tuple[str, Content]:
    """Read a record of either of the scripts that fetch the texts: one writes `turns`, the other `messages`."""
    messages = row.get("messages")
    if messages is None:
        task, content = _first_turn(row, where)
    else:
        chat = parse_messages(messages, where)
        task, content = str(_present(row, "category")), _tidied(Chat(chat.messages[:1]))
    if isinstance(content, Chat) and SPEED_BENCH_PLACEHOLDER in content.messages[0]["content"]:
        raise DataError(
            f"{where}: a placeholder instead of the prompt; expected the texts, which the dataset's licence does not "
            "let it carry: everyone fetches them from their sources. Run nemo_skills/dataset/speed-bench/prepare.py of "
            "NVIDIA-NeMo/Skills (or examples/specdec_bench/prepare_data.py of NVIDIA/Model-Optimizer) with "
            "'--config qualitative', and give the file it writes."
        )
    return task, content


def _human_eval(row: Row, where: str) -> tuple[str, Content]:
    return "humaneval", PromptResponse(_text(row, "prompt", where), "")


def _gsm8k(row: Row, where: str) -> tuple[str, Content]:
    return "gsm8k", _question(row, "question", where)


def _question(row: Row, field: str, where: str) -> Chat:
    return Chat(({"role": "user", "content": _text(row, field, where).strip()},))


def _text(row: Row, field: str, where: str) -> str:
    value = _present(row, field)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {field} is {value!r:.60}; expected text. Fill it in, or remove the record.")
    return value


def _present(row: Row, field: str) -> Any:
    """Return a field's value; a KeyError where there is none (a column of other records counts as none)."""
    if row.get(field) is None:
        raise KeyError(field)
    return row[field]


def _fields(row: Row) -> str:
    return ", ".join(repr(field) for field, value in row.items() if value is not None)


_TURNS = "`question_id`, `category` and `turns`, a list of texts"

BENCHMARKS: Mapping[str, Benchmark] = {
    "mt-bench": Benchmark(_TURNS, None, "train", _first_turn),
    "spec-bench": Benchmark(_TURNS, None, "train", _first_turn),
    "speed-bench": Benchmark(f"{_TURNS} (or `messages`)", "qualitative", "test", _speed_bench),
    "humaneval": Benchmark("`task_id` and `prompt`", None, "test", _human_eval),
    "gsm8k": Benchmark("`question` and `answer`", "main", "test", _gsm8k),
}
"""The published benchmarks whose files are understood, by the name that goes before ``:LOCATION``."""
