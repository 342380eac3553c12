"""Prompt suites: named sets of prompts, each of a task, on which acceptance is measured.

``builtin`` was written for this project: real kinds of requests in eleven tasks, ``builtin.jsonl`` beside this file.
``demo`` is the demo's own domain, none of which its recipes train on: on a model that small, eleven tasks say nothing.
``mt-bench:LOC``, ``spec-bench:LOC``, ``speed-bench:LOC``, ``humaneval:LOC`` and ``gsm8k:LOC`` read a file of that
benchmark, or its dataset on the hub (``suite_files.py``); anything else is the path of a file of the user's own.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_train.data.prompts import build_prompts, continuation_prompts
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record, content_group, parse_messages
from mtp_train.data.sources import load_records
from mtp_train.data.split import is_held_out, stable_share
from mtp_train.demo import demo_path
from mtp_train.errors import DataError
from mtp_train.study.records import TaskPrompt
from mtp_train.study.suite_context import SEPARATOR, Filler, content_text
from mtp_train.study.suite_files import BENCHMARKS, SuiteRecord, read_benchmark, read_own

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN, DEMO = "builtin", "demo"
BUILTIN_FILE = Path(__file__).parent / "builtin.jsonl"
DEMO_HOLDOUT, DEMO_SEED = 0.2, 0
"""What the demo's recipes hold out of its questions: no head they train has seen these."""

PROBES = "0", "q"
"""Two contents without a first character in common, to find where a template writes the content."""


@dataclass(frozen=True)
class Suite:
    """Hold the prompts of a suite, as text.

    Args:
        name: As the user gave it.
        records: In the order of the file; ids are unique.
    """

    name: str
    records: tuple[SuiteRecord, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks, in the order in which they first appear."""
        return tuple(dict.fromkeys(one.task for one in self.records))


def load_suite(name: str) -> Suite:
    """Read a suite.

    Args:
        name: ``builtin``, ``demo``, ``BENCHMARK:LOCATION``, or the location of records of the user's own: a file that
            ``data.sources`` reads, too.

    Raises:
        DataError: There is no such suite or file, or it holds something else.
    """
    kind, colon, location = name.partition(":")
    if name == BUILTIN:
        return Suite(name, tuple(_builtin_records()))
    if name == DEMO:
        return Suite(name, tuple(_demo_records()))
    if kind in BENCHMARKS and location:
        return Suite(name, tuple(read_benchmark(kind, location)))
    is_location = not colon and kind not in BENCHMARKS and set(name) & set("/.*")
    if is_location or Path(name).expanduser().exists():
        return Suite(name, tuple(read_own(name)))
    known = ", ".join([BUILTIN, DEMO, *(f"{benchmark}:LOCATION" for benchmark in BENCHMARKS)])
    if kind in BENCHMARKS:
        cure = f"Write {kind}: and its file, or the id of its dataset on the hub."
    else:
        cure = f"{_near(kind, [BUILTIN, DEMO, *BENCHMARKS])}Use one of them, or a path."
    raise DataError(f"suite {name!r}: no such suite or file; expected {known}, or a file of your own. {cure}")


def suite_location(name: str) -> str | None:
    """Return the file or dataset that a suite is read from; None for one of the package."""
    kind, _, location = name.partition(":")
    if name in (BUILTIN, DEMO):
        return None
    return location if kind in BENCHMARKS and location else name


def choose_records(
    suite: Suite, *, prompts_per_task: int | None = None, seed: int = 0, tasks: Sequence[str] | None = None
) -> list[SuiteRecord]:
    """Return the records that are asked about, task by task.

    Which ones depends on their ids and the seed alone: a larger number keeps those of a smaller one.

    Args:
        suite: The suite.
        prompts_per_task: So many of each task (all, where there are fewer); None for all.
        seed: Another seed chooses others.
        tasks: Of these tasks; None for all.

    Raises:
        DataError: The suite has no such task.
    """
    known = suite.tasks
    for task in tasks or ():
        if task not in known:
            raise DataError(
                f"suite {suite.name!r}: no task {task!r}; expected some of {', '.join(known)}. "
                f"{_near(task, known)}Correct the name, or leave tasks out for all."
            )
    chosen: list[SuiteRecord] = []
    for task in known if tasks is None else dict.fromkeys(tasks):
        ranked = sorted(
            (one for one in suite.records if one.task == task),
            key=lambda one: (stable_share(one.record.id, seed), one.record.id),
        )
        chosen += ranked[:prompts_per_task]
    return chosen


def suite_prompts(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_tokens: int | None = None,
    prompts_per_task: int | None = None,
    seed: int = 0,
    tasks: Sequence[str] | None = None,
) -> list[TaskPrompt]:
    """Return the tokens of a suite's prompts, each brought to a length where one is asked for.

    Chats are written with the chat template; a system message goes to the head of the first user message where the
    template refuses it. A base model has no template: there the messages follow one another as plain text, parted by
    an empty line. Prompts of raw text are taken as they are, and texts are continued from their half.

    ``context_tokens`` brings every prompt to exactly that many tokens at matched content: other text of the suite is
    put before the last user message's content (before raw text: at its start) and nothing else changes, token for
    token. The ids are the same at all lengths. The text before it is other prompts of the suite, those of the same
    task nearest and never one of the prompt's own group, and again the first only after all were used: at 32k tokens a
    small suite repeats itself.
    A prompt that is longer already is left out; so is a text too short to be continued. How many were left out is the
    difference to :func:`choose_records` of the same arguments.

    Args:
        suite: The suite.
        tokenizer: The trunk's.
        context_tokens: The length of every prompt; None leaves them as they are.
        prompts_per_task: As for :func:`choose_records`.
        seed: It chooses the prompts and orders the text before them.
        tasks: As for :func:`choose_records`.

    Raises:
        DataError: There is no such task, a record does not fit the tokenizer, or no prompt is left.
    """
    records = choose_records(suite, prompts_per_task=prompts_per_task, seed=seed, tasks=tasks)
    filler = Filler(suite.records, tokenizer, seed)
    prompts = []
    for one in records:
        record, prompt_ids = one.record, _prompt_ids(one.record, tokenizer)
        if not prompt_ids or (context_tokens is not None and len(prompt_ids) > context_tokens):
            continue
        if context_tokens is not None:
            place = _place(record, tokenizer, prompt_ids)
            before = filler.before(one, context_tokens - len(prompt_ids))
            prompt_ids = (*prompt_ids[:place], *before, *prompt_ids[place:])
        prompts.append(TaskPrompt(id=record.id, group=record.group, prompt_ids=prompt_ids, task=one.task))
    if not prompts:
        limit = "of two tokens or more" if context_tokens is None else f"of {context_tokens} tokens or fewer"
        raise DataError(
            f"suite {suite.name!r}: none of {len(records)} prompts is {limit}; expected at least one. Ask for longer "
            "contexts, or use other prompts."
        )
    return prompts


def _prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens after which the trunk speaks; none of a text too short to have a half."""
    if isinstance(record.content, PlainText):
        prompts = continuation_prompts([record], tokenizer)
    elif isinstance(record.content, Chat) and record.content.prompt_messages() and tokenizer.chat_template is None:
        plain = PromptResponse(content_text(record.content), "")
        prompts = build_prompts([replace(record, content=plain)], tokenizer)
    else:
        try:
            prompts = build_prompts([record], tokenizer)
        except DataError:
            merged = _without_system(record.content)
            if merged == record.content:
                raise
            prompts = build_prompts([replace(record, content=merged)], tokenizer)
    return prompts[0].prompt_ids if prompts else ()


def _without_system(content: Content) -> Content:
    """Return a chat with its system message at the head of the user's first, as some templates know no such role."""
    if not isinstance(content, Chat) or [message["role"] for message in content.messages[:2]] != ["system", "user"]:
        return content
    system, user, *others = content.messages
    return Chat(({**user, "content": system["content"] + SEPARATOR + user["content"]}, *others))


def _place(record: Record, tokenizer: PreTrainedTokenizerBase, prompt_ids: tuple[int, ...]) -> int:
    """Return how many of a prompt's tokens come before what is asked.

    In a chat, it is where the prompt parts from what it would be with another last user message. No tokenizer has to
    say where its tokens lie in the text, and no template has to write the message as it stands.

    Raises:
        DataError: The template does not write that message.
    """
    if not isinstance(record.content, Chat):
        return int(prompt_ids[0] == tokenizer.bos_token_id)
    messages = record.content.prompt_messages()
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    asked = users[-1] if users else len(messages) - 1
    place = len(prompt_ids)
    for probe in PROBES:
        changed = ({**messages[asked], "content": probe}, *messages[asked + 1 :])
        other_ids = _prompt_ids(replace(record, content=Chat((*messages[:asked], *changed))), tokenizer)
        pairs = enumerate(zip(prompt_ids, other_ids, strict=False))
        place = min(place, next((index for index, (one, other) in pairs if one != other), len(prompt_ids)))
    if place == len(prompt_ids):
        raise DataError(
            f"{record.where}: the chat template does not write the last user message; expected its text, to put other "
            "text before it. Leave contexts out, or use another template."
        )
    return place


def _builtin_records() -> list[SuiteRecord]:
    records, numbers = [], Counter[str]()
    for line in BUILTIN_FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        numbers[row["task"]] += 1
        # Numbered within the task, so that prompts added to one leave the choice among the others as it was.
        id = f"{BUILTIN}#{row['task']}-{numbers[row['task']]}"
        content = parse_messages(row["messages"], id)
        records.append(SuiteRecord(row["task"], Record(id, content_group(content), content)))
    return records


def _demo_records() -> list[SuiteRecord]:
    """Return questions about functions that the recipes hold out, and code to go on with, which none trains on."""
    functions = load_records(str(demo_path("prompts")), group_field="group", name="demo:prompts")
    code = load_records(str(demo_path("code")), group_field="group", name="demo:code")
    held_out = [record for record in functions if is_held_out(record.group, DEMO_HOLDOUT, DEMO_SEED)]
    return [SuiteRecord(task, record) for task, part in (("functions", held_out), ("code", code)) for record in part]


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}? " if near else ""
