"""Store the trunk's responses as JSON lines, and read them back as documents.

One line of a file is ``{"id", "group", "prompt_ids", "response_ids", "finished", "seed"}``. Every process appends to a
file of its own, and responses that were copied from another run are in ``copied.jsonl``. All files of the directory are
read together, so that a run can resume with another number of processes. A last line that a kill cut off is skipped by
readers, and dropped when its process appends the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mtp_train.checkpoints.writing import replaced
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import DataError

MIN_RESPONSE_TOKENS = 2
"""Shorter responses are skipped: after their first token there is nothing to draft."""
FILE_PATTERN = "regenerated-*-of-*.jsonl"
COPIED_FILE = "copied.jsonl"
"""Responses of another run; written at once, so that the file is complete if it exists."""


@dataclass(frozen=True)
class RegeneratedRow:
    """Hold one response.

    Args:
        group: The record's group: held-out splits and intervals keep or leave out whole groups.
        response_ids: The trunk's tokens, the end-of-text token included.
        finished: Whether the response ended in an end-of-text token.
        seed: Seed of the sampling noise; not used in greedy decoding.
    """

    id: str
    group: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finished: bool
    seed: int


_ROW = TypeAdapter(RegeneratedRow)


@dataclass(frozen=True, kw_only=True)
class ResponseCounts:
    """Stored responses, counted by kind: all of them, unless a field states otherwise."""

    responses: int
    """Responses to the prompts that are trained on."""
    documents: int
    """Responses that are trained on: not too short, and not cut before their first target."""
    response_tokens: int
    """Tokens that the documents are trained on."""
    too_short: int
    """Responses under ``MIN_RESPONSE_TOKENS``, which are left out."""
    truncated: int
    """Documents cut at ``seq_len_tokens``."""
    unfinished: int
    """Responses that reached the limit of new tokens."""


class RegeneratedStore:
    """Keep responses in a directory, one file per process."""

    def __init__(self, directory: Path, *, rank: int = 0, world: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.rank = rank
        self.world = world
        self.path = directory / f"regenerated-{rank:05d}-of-{world:05d}.jsonl"

    def __iter__(self) -> Iterator[RegeneratedRow]:
        """Read the rows of all processes one by one, copied rows first, each id once."""
        return stored_rows(self.directory)

    def append(self, rows: Sequence[RegeneratedRow]) -> None:
        append_rows(self.path, rows)

    def to_documents(self, seq_len_tokens: int, groups: Mapping[str, str]) -> tuple[list[Document], ResponseCounts]:
        """Return the stored responses as documents whose targets are the response tokens.

        Args:
            seq_len_tokens: Longer texts, prompt and response together, are cut.
            groups: The group of each prompt by its id. Responses to other prompts are left out: prompts of an earlier
                split may be held out now.

        Raises:
            DataError: No response can be trained on.
        """
        tally = Counter(responses=0)
        documents = []
        for row in (replace(row, group=groups[row.id]) for row in self if row.id in groups):
            num_tokens = len(row.response_ids)
            too_short = num_tokens < MIN_RESPONSE_TOKENS
            document = answer_document(row, row.response_ids, seq_len_tokens)
            is_kept = not too_short and document.has_target()
            if is_kept:
                documents.append(document)
            tally.update(
                responses=1,
                documents=is_kept,
                response_tokens=int(document.loss_mask.sum()) if is_kept else 0,
                too_short=too_short,
                truncated=is_kept and len(row.prompt_ids) + num_tokens > seq_len_tokens,
                unfinished=not row.finished,
            )
        if not documents:
            raise DataError(
                f"{self.directory}: {tally['responses']} responses, {tally['too_short']} of them under "
                f"{MIN_RESPONSE_TOKENS} tokens; expected at least one to learn from. Check the trunk's chat template "
                "and its end-of-text token, or switch data.regenerate off."
            )
        return sorted(documents, key=lambda document: document.id), ResponseCounts(**tally)


def response_files(directory: Path) -> list[Path]:
    return [*directory.glob(COPIED_FILE), *sorted(directory.glob(FILE_PATTERN))]


def stored_rows(directory: Path) -> Iterator[RegeneratedRow]:
    """Yield the rows of all files of a directory, each id once. Writes nothing."""
    seen: set[str] = set()
    for path in response_files(directory):
        for row in file_rows(path):
            if row.id not in seen:
                seen.add(row.id)
                yield row


def write_copied(directory: Path, rows: Iterable[RegeneratedRow]) -> None:
    """Write the responses that were copied from another run: all of them, or no file."""
    with replaced(directory / COPIED_FILE) as handle:
        handle.writelines(map(_line, rows))


def file_rows(path: Path) -> Iterator[RegeneratedRow]:
    """Yield the complete rows of a file; none without a file."""
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            yield _ROW.validate_json(line)
        except ValidationError as error:
            raise DataError(
                f"{path}, line {number}: cannot be read ({error.errors()[0]['msg']}); expected a response of "
                "`regenerate`. Delete the line: its prompt will be answered again."
            ) from error


def settings_key(settings: Mapping[str, object]) -> str:
    """Return a hash of settings (plain JSON values) for a store's name: other settings must not reuse its responses."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _line(row: Any) -> bytes:
    return (json.dumps(asdict(row)) + "\n").encode()


def answer_document(asked: Prompt | RegeneratedRow, response_ids: tuple[int, ...], seq_len_tokens: int) -> Document:
    """Return a prompt and its response as a document, cut at its end, whose targets are the response tokens."""
    token_ids = asked.prompt_ids + response_ids
    mask = (False,) * len(asked.prompt_ids) + (True,) * len(response_ids)
    return Document(token_ids[:seq_len_tokens], mask[:seq_len_tokens], asked.group, asked.id)


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file but a last one that is incomplete: it was cut off, or is being written."""
    if path.is_file():
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append dataclasses to a file as lines of JSON, in place of a last line that a kill cut off, and sync the file."""
    with path.open("ab") as file:
        file.truncate(sum(map(len, whole_lines(path))))
        file.write(b"".join(map(_line, rows)))
        file.flush()
        os.fsync(file.fileno())
