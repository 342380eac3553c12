"""The trunk's own responses: generated batch by batch, stored line by line, resumable after any kill.

One line of a file is ``{"id", "group", "prompt_ids", "response_ids", "finished"}``. Every process appends to a file of
its own; all files of the directory are read together, so that a run resumes with another number of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mtp_train.data.prompts import Prompt
from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError

MIN_RESPONSE_TOKENS = 2
"""Shorter responses teach nothing about drafting: there is nothing to draft after their first token."""
RESPONSE_ROOM_TOKENS = 16
"""A prompt that leaves less room than this in a sequence is not answered."""
FILE_PATTERN = "regenerated-*-of-*.jsonl"

PROMPTS_PER_ROW = 4
"""Prompts of one batch for each of its rows: rows that end early take the next prompt, so that few stand idle."""

GenerateFn = Callable[[list[list[int]], list[int]], list[list[int]]]
"""From prompts and their limits of new tokens to responses, each up to and with its end-of-text token."""


@dataclass(frozen=True)
class RegeneratedRow:
    """Hold one response.

    Args:
        id: The record's id.
        group: The record's group.
        prompt_ids: What was asked.
        response_ids: What the trunk said, its end-of-text token included.
        finished: Whether it ended by itself.
    """

    id: str
    group: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, kw_only=True)
class RegenerateCounts:
    """Say what one process did."""

    prompts: int
    too_long: int
    """Prompts that leave less than ``RESPONSE_ROOM_TOKENS`` in a sequence."""
    reused: int
    """Prompts, of all processes, answered before this call."""
    generated: int
    """Prompts answered by this process now."""


@dataclass(frozen=True, kw_only=True)
class ResponseCounts:
    """Say what the stored responses are like."""

    responses: int
    documents: int
    response_tokens: int
    too_short: int
    """Responses under ``MIN_RESPONSE_TOKENS``; no document is made of them."""
    truncated: int
    """Responses cut at ``seq_len_tokens``."""
    unfinished: int
    """Responses that ran into the limit of new tokens."""


class RegeneratedStore:
    """Keep responses in a directory, one file per process.

    Opening drops a last line that a kill tore.

    Args:
        directory: Made if need be.
        rank: This process.
        world: Number of processes.
    """

    def __init__(self, directory: Path, *, rank: int = 0, world: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.path = directory / f"regenerated-{rank:05d}-of-{world:05d}.jsonl"
        if self.path.exists():
            whole = _whole_lines(self.path.read_bytes())
            if len(whole) < self.path.stat().st_size:
                os.truncate(self.path, len(whole))

    def rows(self) -> list[RegeneratedRow]:
        """Return the rows of all processes, sorted by id, each id once.

        Raises:
            DataError: A line is not one of ours.
        """
        by_id: dict[str, RegeneratedRow] = {}
        for path in sorted(self.directory.glob(FILE_PATTERN)):
            for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), start=1):
                row = _parse_row(line, f"{path}, line {number}")
                by_id.setdefault(row.id, row)
        return [by_id[row_id] for row_id in sorted(by_id)]

    def done_ids(self) -> set[str]:
        """Return the ids answered by any process."""
        return {row.id for row in self.rows()}

    def append(self, rows: Sequence[RegeneratedRow]) -> None:
        """Add rows to this process's file; they are on the disk when this returns."""
        text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def to_documents(self, seq_len_tokens: int) -> tuple[list[Document], ResponseCounts]:
        """Return the stored responses as documents whose targets are the response tokens.

        Raises:
            DataError: No response is long enough to learn from.
        """
        documents = []
        rows = self.rows()
        kept = [row for row in rows if len(row.response_ids) >= MIN_RESPONSE_TOKENS]
        truncated = 0
        for row in kept:
            token_ids = row.prompt_ids + row.response_ids
            mask = (False,) * len(row.prompt_ids) + (True,) * len(row.response_ids)
            document = Document(token_ids[:seq_len_tokens], mask[:seq_len_tokens], row.group, row.id)
            truncated += len(token_ids) > seq_len_tokens
            if document.has_target():
                documents.append(document)
        if not documents:
            raise DataError(
                f"{self.directory}: {len(rows)} responses, {len(rows) - len(kept)} of them under {MIN_RESPONSE_TOKENS} "
                "tokens; expected at least one to learn from. The trunk ends its answers at once: check its chat "
                "template and its end-of-text token, or switch data.regenerate off."
            )
        return documents, ResponseCounts(
            responses=len(rows),
            documents=len(documents),
            response_tokens=sum(sum(document.loss_mask) for document in documents),
            too_short=len(rows) - len(kept),
            truncated=truncated,
            unfinished=sum(not row.finished for row in rows),
        )


def regenerate(
    prompts: Sequence[Prompt],
    store: RegeneratedStore,
    generate_fn: GenerateFn,
    *,
    seq_len_tokens: int,
    batch_size: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
    rank: int = 0,
    world: int = 1,
    on_batch: Callable[[int, int], None] | None = None,
) -> RegenerateCounts:
    """Answer prompts with the trunk and store the responses; those already stored are left alone.

    The batches are the same whatever the number of processes and whatever is done already, because in bf16 a response
    may depend on what it was generated with. Process ``rank`` takes every ``world``-th batch.

    Args:
        prompts: Those of all processes; their order does not matter.
        store: This process's.
        generate_fn: The trunk's greedy decoding.
        seq_len_tokens: No response goes past this many tokens, prompt included.
        batch_size: Prompts that are decoded together; a batch has ``PROMPTS_PER_ROW`` times as many.
        max_new_tokens: Limit of every response.
        eos_ids: The tokens that end a response.
        rank: This process.
        world: Number of processes.
        on_batch: Told the number of batches behind us and in all, of this process.

    Raises:
        DataError: Every prompt is too long, or the store holds responses to other prompts.
    """
    fitting = [prompt for prompt in prompts if len(prompt.prompt_ids) + RESPONSE_ROOM_TOKENS <= seq_len_tokens]
    if not fitting:
        raise DataError(
            f"data.regenerate: {len(prompts)} prompts, none of at most {seq_len_tokens - RESPONSE_ROOM_TOKENS} tokens; "
            "expected prompts that leave room for a response. Raise data.seq_len_tokens, or use shorter prompts."
        )
    stored = {row.id: row.prompt_ids for row in store.rows()}
    _check_same_prompts(fitting, stored, store)
    own_batches = batches_by_length(fitting, PROMPTS_PER_ROW * batch_size)[rank::world]
    generated = 0
    for number, batch in enumerate(own_batches, start=1):
        missing = [prompt for prompt in batch if prompt.id not in stored]
        if missing:
            limits = [min(max_new_tokens, seq_len_tokens - len(prompt.prompt_ids)) for prompt in batch]
            responses = generate_fn([list(prompt.prompt_ids) for prompt in batch], limits)
            rows = [_row(prompt, ids, eos_ids) for prompt, ids in zip(batch, responses, strict=True)]
            store.append([row for row in rows if row.id not in stored])
            generated += len(missing)
        if on_batch is not None:
            on_batch(number, len(own_batches))
    return RegenerateCounts(
        prompts=len(prompts),
        too_long=len(prompts) - len(fitting),
        reused=sum(prompt.id in stored for prompt in fitting),
        generated=generated,
    )


def batches_by_length(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Part prompts into batches of like length, the longest first, so that a lack of memory shows at once."""
    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.prompt_ids), prompt.id))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


def _check_same_prompts(prompts: Sequence[Prompt], stored: dict[str, tuple[int, ...]], store: RegeneratedStore) -> None:
    for prompt in prompts:
        if prompt.id in stored and stored[prompt.id] != prompt.prompt_ids:
            raise DataError(
                f"{store.directory}: the stored response of {prompt.id} answers another prompt; expected the prompt of "
                "the current data. The data or the tokenizer changed: remove that directory, or use a new run_dir."
            )


def _row(prompt: Prompt, response_ids: Sequence[int], eos_ids: Collection[int]) -> RegeneratedRow:
    """Cut a response after its first end-of-text token."""
    ends = [index for index, token in enumerate(response_ids) if token in eos_ids]
    kept = response_ids[: ends[0] + 1] if ends else response_ids
    return RegeneratedRow(prompt.id, prompt.group, prompt.prompt_ids, tuple(int(token) for token in kept), bool(ends))


def _whole_lines(content: bytes) -> bytes:
    """Return the content up to and with its last line end."""
    return content[: content.rfind(b"\n") + 1]


def _parse_row(line: bytes, where: str) -> RegeneratedRow:
    try:
        fields = json.loads(line)
        return RegeneratedRow(
            id=str(fields["id"]),
            group=str(fields["group"]),
            prompt_ids=tuple(int(token) for token in fields["prompt_ids"]),
            response_ids=tuple(int(token) for token in fields["response_ids"]),
            finished=bool(fields["finished"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: cannot be read ({error}); expected a response that `regenerate` wrote. Delete the line: its "
            "prompt will be answered again."
        ) from error
