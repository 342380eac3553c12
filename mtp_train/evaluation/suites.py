"""Load prompt suites: named sets of prompts, each with a task, on which acceptance is measured.

- ``builtin`` was written for this project: eleven tasks, in ``builtin.jsonl`` beside this file.
- ``demo`` holds prompts of the demo's domain that its recipes hold out. The demo's model is too small for ``builtin``.
- ``mt-bench:LOC``, ``spec-bench:LOC``, ``speed-bench:LOC``, ``humaneval:LOC`` and ``gsm8k:LOC`` read a file of that
  benchmark, or its dataset on the hub.
- Anything else is the path of the user's own file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from mtp_train.checkpoints.demo import demo_path
from mtp_train.checkpoints.tokenizer import NO_VARIABLES, Variables, raw_tokens
from mtp_train.data.groups import is_held_out, stable_share
from mtp_train.data.records import Chat, Content, PromptResponse, Record, with_variables
from mtp_train.data.sources import load_records, local_files
from mtp_train.data.tokenize import Prompt, build_prompts, choose_prompts, shared_start
from mtp_train.errors import DataError
from mtp_train.evaluation.results import ALL_TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SEPARATOR = "\n\n"


class Layout(NamedTuple):
    """How a suite is read: of the hub its configuration, of the hub and of a directory its split, and its columns."""

    config: str | None = None
    split: str = "train"
    columns: Mapping[str, str] = MappingProxyType({})


BENCHMARKS: Mapping[str, Layout] = {
    "mt-bench": Layout(),
    "spec-bench": Layout(),
    "speed-bench": Layout("qualitative", "test"),
    "humaneval": Layout(split="test"),
    "gsm8k": Layout("main", "test", {"instruction": "question"}),
}
"""The supported benchmarks, by the name before ``:LOCATION``. Of a conversation the first message is asked."""


def read_records(name: str, location: str, layout: Layout, stem: str) -> list[Record]:
    """Return the records of a file, of a directory or of a dataset on the hub.

    Args:
        stem: Start of the records' ids, and the task of records that name none.

    Raises:
        DataError: The file does not exist, is of another format, or holds placeholders instead of texts.
    """
    is_local = local_files(location, name) is not None
    has_splits = not is_local or Path(location).expanduser().is_dir()
    found = load_records(
        location,
        config=None if is_local else layout.config,
        split=layout.split if has_splits else "train",
        columns=layout.columns,
        task=stem,
        name=name,
    )
    records = []
    for record in found:
        content, number = record.content, record.id.rpartition("#")[2]
        if record.task == ALL_TASKS:
            raise DataError(
                f"{record.where}: the task {ALL_TASKS!r}; expected another name, as reports use it for all tasks "
                "together. Rename it."
            )
        if SPEED_BENCH_PLACEHOLDER in content_text(content):
            raise DataError(
                f"{record.where}: a placeholder instead of the prompt; expected the text, which the dataset's licence "
                "does not allow it to contain: each user fetches the texts from their sources. Run "
                "nemo_skills/dataset/speed-bench/prepare.py of NVIDIA-NeMo/Skills (or "
                "examples/specdec_bench/prepare_data.py of NVIDIA/Model-Optimizer) with '--config qualitative', and "
                "pass the file it writes."
            )
        if isinstance(content, Chat):
            asked = content.messages[:1] if stem in BENCHMARKS else content.messages
            # Leading white space would become part of a message's first token.
            messages = (one | {"content": one["content"].strip()} if one["role"] == "user" else one for one in asked)
            content = replace(content, messages=tuple(messages))
        records.append(replace(record, id=f"{stem}#{number}", content=content))
    return records


def text_before(
    asked: Record,
    num_tokens: int,
    records: Sequence[Record],
    seed: int,
    tokens_of: Callable[[str], list[int]],
) -> tuple[int, ...]:
    """Return exactly ``num_tokens`` tokens of other records' texts, as context before a record's own prompt.

    Records of the same group are left out. Records of the same task are placed nearest to the prompt. A text repeats
    only after all others were used. The context is filled from its end: a shorter context equals the end of a longer
    one, and only the first text can be cut.

    Args:
        records: Those of the suite, in an order that depends on the seed.
        seed: Determines, with the record's id, where the order of the texts starts.

    Raises:
        DataError: The suite has no other text.
    """
    start = int(stable_share(asked.id, seed) * len(records))
    own_text = content_text(asked.content)
    others = [
        content_text(one.content)
        for one in sorted((*records[start:], *records[:start]), key=lambda one: one.task == asked.task)
        if one.group != asked.group
    ]
    tokens = [token for text in others if text != own_text for token in tokens_of(text + SEPARATOR)]
    if not tokens:
        raise DataError(
            f"{asked.where}: the suite has no other text to put before it; expected at least one record of "
            "another group. Add records, or leave contexts out."
        )
    repeated = tokens * (1 + num_tokens // len(tokens))
    return tuple(repeated[len(repeated) - num_tokens :])


def content_text(content: Content) -> str:
    if isinstance(content, Chat):
        return SEPARATOR.join(message["content"] for message in content.prompt_messages())
    return content.prompt if isinstance(content, PromptResponse) else content.text


BUILTIN, DEMO = "builtin", "demo"
BUILTIN_FILE = Path(__file__).parent / "builtin.jsonl"
DEMO_HOLDOUT, DEMO_SEED = 0.2, 0
"""The hold-out share and seed of the demo's recipes: their heads were not trained on the held-out questions."""

PROBES = "0", "q"
"""Two message contents with different first characters, to locate the content in a template's output."""


def load_suite(
    name: str,
    chat_template_kwargs: Variables = NO_VARIABLES,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> list[Record]:
    """Return the records of a suite, each with its task.

    Args:
        name: ``builtin``, ``demo``, ``BENCHMARK:LOCATION``, or the location of the user's own records, in any format
            that ``data.sources`` reads.
        chat_template_kwargs: Variables for the chat template, where a record has none of that name.
        columns: Names of columns in the user's own records, by those that ``data.sources`` reads.
    """
    return [with_variables(one, chat_template_kwargs) for one in _records_of(name, columns)]


def _records_of(name: str, columns: Mapping[str, str]) -> list[Record]:
    kind, colon, location = name.partition(":")
    if columns and (name in (BUILTIN, DEMO) or (kind in BENCHMARKS and location)):
        raise DataError(
            f"--columns: given for the suite {name}, which has columns of its own; expected a file of yours. Leave "
            "them out."
        )
    if name == BUILTIN:
        return _builtin_records()
    if name == DEMO:
        return _demo_records()
    if kind in BENCHMARKS and location:
        return read_records(name, location, BENCHMARKS[kind], kind)
    is_location = not colon and kind not in BENCHMARKS and set(name) & set("/.*")
    if is_location or Path(name).expanduser().exists():
        return read_records(name, name, Layout(columns=columns), Path(name).name.split(".")[0])
    known = ", ".join([BUILTIN, DEMO, *(f"{benchmark}:LOCATION" for benchmark in BENCHMARKS)])
    if kind in BENCHMARKS:
        cure = f"Write {kind}: and its file, or the id of its dataset on the hub."
    else:
        cure = "Use one of them, or a path."
    raise DataError(f"suite {name!r}: no such suite or file; expected {known}, or a file of your own. {cure}")


def suite_location(name: str) -> str | None:
    """Return the file or dataset that a suite is read from; None for the demo's, which are several."""
    kind, _, location = name.partition(":")
    if name in (BUILTIN, DEMO):
        return str(BUILTIN_FILE) if name == BUILTIN else None
    return location if kind in BENCHMARKS and location else name


def choose_records(
    suite: Sequence[Record], *, prompts_per_task: int | None = None, seed: int = 0, tasks: Sequence[str] | None = None
) -> list[Record]:
    """Return a choice of a suite's records, task by task.

    The choice depends on the records' ids and the seed alone. A larger ``prompts_per_task`` extends a smaller choice.

    Args:
        prompts_per_task: The most records per task; None for all.

    Raises:
        DataError: The suite has no task of one of these names.
    """
    known = dict.fromkeys(one.task for one in suite)
    chosen: list[Record] = []
    for task in dict.fromkeys(known if tasks is None else tasks):
        if task not in known:
            raise DataError(
                f"--tasks: the suite has no task {task!r}; expected some of {', '.join(known)}. "
                "Correct the name, or leave tasks out for all."
            )
        chosen += choose_prompts((one for one in suite if one.task == task), prompts_per_task, seed)
    return chosen


def suite_prompts(
    suite: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_tokens: int | None = None,
    prompts_per_task: int | None = None,
    seed: int = 0,
    tasks: Sequence[str] | None = None,
) -> list[Prompt]:
    """Return the tokens of a suite's prompts, extended to ``context_tokens`` where given.

    Chats are rendered by the chat template. If the template rejects a system message, its text is prepended to the
    first user message. Without a template (base models), the messages are joined as plain text by empty lines. Prompts
    of raw text are used unchanged, and texts are continued from their half.

    ``context_tokens`` extends every prompt to exactly that length with unchanged content: other text of the suite
    (:func:`text_before`) is inserted before the content of the last user message (at the start of raw text), and all
    other tokens stay the same. A prompt keeps its id at all lengths. At 32k tokens the texts of a small suite repeat.

    Prompts that are longer already are left out, and so are texts too short to be continued. Compare with the length of
    :func:`choose_records` to see how many.

    Args:
        context_tokens: The length of every prompt; None leaves the prompts unchanged.
        seed: Determines the choice of prompts and the order of the inserted texts.

    Raises:
        DataError: A task does not exist, a record does not fit the tokenizer, or no prompt is left.
    """
    records = choose_records(suite, prompts_per_task=prompts_per_task, seed=seed, tasks=tasks)
    # All records, so that the context of a prompt does not depend on which other prompts were chosen.
    every = choose_prompts(suite, None, seed)

    @cache
    def tokens_of(text: str) -> list[int]:
        return raw_tokens(tokenizer, text, start=False)

    prompts = []
    for record in records:
        prompt_ids = _prompt_ids(record, tokenizer)
        if not prompt_ids or (context_tokens is not None and len(prompt_ids) > context_tokens):
            continue
        if context_tokens is not None and context_tokens > len(prompt_ids):
            place = _place(record, tokenizer, prompt_ids)
            before = text_before(record, context_tokens - len(prompt_ids), every, seed, tokens_of)
            prompt_ids = (*prompt_ids[:place], *before, *prompt_ids[place:])
        prompts.append(Prompt(record.id, record.group, prompt_ids, record.task))
    if not prompts:
        limit = "of two tokens or more" if context_tokens is None else f"of {context_tokens} tokens or fewer"
        raise DataError(
            f"--suite: none of {len(records)} prompts is {limit}; expected at least one. Ask for longer "
            "contexts, or use other prompts."
        )
    return prompts


def _prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that the trunk continues; empty for a text too short to be split in half."""
    content = record.content
    if isinstance(content, Chat) and content.prompt_messages() and tokenizer.chat_template is None:
        content = PromptResponse(content_text(content))
    try:
        prompts = build_prompts([replace(record, content=content)], tokenizer)
    except DataError:
        merged = _without_system(content)
        if merged == content:
            raise
        prompts = build_prompts([replace(record, content=merged)], tokenizer)
    return prompts[0].prompt_ids if prompts else ()


def _without_system(content: Content) -> Content:
    """Return a chat with its system message prepended to the first user message, for templates without that role."""
    if not isinstance(content, Chat) or [message["role"] for message in content.messages[:2]] != ["system", "user"]:
        return content
    system, user, *others = content.messages
    return replace(content, messages=({**user, "content": system["content"] + SEPARATOR + user["content"]}, *others))


def _place(record: Record, tokenizer: PreTrainedTokenizerBase, prompt_ids: tuple[int, ...]) -> int:
    """Return the number of prompt tokens before the content of the last user message (of raw text: its start).

    In a chat, it is the first token that differs when the prompt is rendered with another last user message. This needs
    no character offsets of the tokenizer, and no template that writes the message unchanged.

    Raises:
        DataError: The template does not render that message.
    """
    if not isinstance(record.content, Chat):
        return int(prompt_ids[0] == tokenizer.bos_token_id)
    messages = record.content.prompt_messages()
    users = (index for index, message in enumerate(messages) if message["role"] == "user")
    asked = max(users, default=len(messages) - 1)
    place = len(prompt_ids)
    for probe in PROBES:
        changed = (*messages[:asked], {**messages[asked], "content": probe}, *messages[asked + 1 :])
        other_ids = _prompt_ids(replace(record, content=replace(record.content, messages=changed)), tokenizer)
        place = min(place, shared_start(prompt_ids, other_ids))
    if place == len(prompt_ids):
        raise DataError(
            f"{record.where}: the chat template does not render the last user message; expected its text, to put other "
            "text before it. Leave contexts out, or use another template."
        )
    return place


def _builtin_records() -> list[Record]:
    records = []
    numbers = Counter[str]()
    for record in read_records(BUILTIN, str(BUILTIN_FILE), Layout(), BUILTIN):
        numbers[record.task] += 1
        # Numbered within the task, so that new prompts of one task do not change the choice in other tasks.
        records.append(replace(record, id=f"{BUILTIN}#{record.task}-{numbers[record.task]}", unread=()))
    return records


def _demo_records() -> list[Record]:
    """Return the questions about functions that the demo's recipes hold out, and code that no recipe trains on."""
    functions = load_records(str(demo_path("prompts")), group_field="group", name="demo:prompts")
    code = load_records(str(demo_path("code")), group_field="group", name="demo:code")
    held_out = [record for record in functions if is_held_out(record.group, DEMO_HOLDOUT, DEMO_SEED)]
    return [replace(record, task=task) for task, part in (("functions", held_out), ("code", code)) for record in part]
