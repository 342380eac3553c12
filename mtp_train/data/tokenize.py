"""Tokenise records: into documents to train on, with a mask of the tokens that may be targets, and into prompts.

The targets of a chat are the assistant's tokens. The chat is rendered up to each assistant turn, as a server does
before it generates, and again with the turn: the text that was added is the assistant's.

Many templates drop the thinking of earlier turns, so a turn is rendered differently once the chat continues. The model
generates a turn after the history as it is rendered at that moment. Such a turn becomes the end of a document of its
own. Some templates drop the thinking of every turn, or open it twice: there the thinking is written as the model
generates it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mtp_train.checkpoints.tokenizer import (
    chat_prompt_tokens,
    raw_tokens,
    render_chat,
    template_variables,
)
from mtp_train.data.groups import stable_share
from mtp_train.data.records import Chat, Message, PlainText, PromptResponse, Record, has_response
from mtp_train.data.sources import CHAT_COLUMNS
from mtp_train.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tokens = tuple[list[int], list[bool]]
"""Token ids, and a mask of the tokens that may be targets."""

THINKING_STARTS = "<think>"
THINKING_ENDS = "</think>"
FIRST_TARGET = 2
"""Index of the first token that any depth can predict: depth 1 at row 0 predicts token 2."""


@dataclass(eq=False, init=False, slots=True)
class Document:
    """Tokens that attend only to one another; 5 bytes per token.

    Args:
        input_ids: The tokens, kept as int32.
        loss_mask: True where the token may be a target.
        id: The record's id. The documents of a split text or of a chat with several documents append ``/0``, ``/1``,
            ...
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    group: str
    id: str

    def __init__(self, input_ids: Sequence[int], loss_mask: Sequence[bool], group: str, id: str) -> None:
        self.input_ids = np.array(input_ids, dtype=np.int32)
        self.loss_mask = np.array(loss_mask, dtype=np.bool_)
        self.group = group
        self.id = id

    def has_target(self) -> bool:
        return bool(self.loss_mask[FIRST_TARGET:].any())


def tokenize_records(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, seq_len_tokens: int
) -> tuple[list[Document], list[str]]:
    """Turn records into documents of at most ``seq_len_tokens`` tokens.

    - Chat: the assistant's tokens are targets. A chat that is too long is truncated.
    - Prompt and response: the response and the end-of-text token after it are targets. A pair that is too long is
      truncated.
    - Plain text: every token and the end-of-text token are targets. A text that is too long is split.

    Returns:
        The documents, and sentences about records that are not learned whole.

    Raises:
        DataError: A record has no response or does not fit the tokenizer, or no record has a target.
    """
    bare = [record.where for record in records if not has_response(record.content)]
    if bare:
        raise DataError(
            f"{bare[0]}: a prompt without a response, as are {len(bare)} of {len(records)} records; expected responses "
            "to train on. Add 'data.regenerate={}', and the trunk answers them, or name their column in columns."
        )
    documents: list[Document] = []
    truncated = dropped = 0
    for record in records:
        texts = [_split(*text, seq_len_tokens) for text in _tokenize(record, tokenizer)]
        if not isinstance(record.content, PlainText):
            truncated += any(len(pieces) > 1 for pieces in texts)
            texts = [pieces[:1] for pieces in texts]
        kept = [document for document in _documents(list(chain(*texts)), record) if document.has_target()]
        dropped += not kept
        documents += kept
    found = (
        (truncated, f"cut after {seq_len_tokens} tokens"),
        (dropped, "left out, as nothing is left to learn from the third token on"),
    )
    notes = [f"{count} of {len(records)} records are {what}" for count, what in found if count]
    if not documents:
        raise DataError(
            f"data: no token left after masking ({'; '.join(notes)}); expected a token to learn from the third token "
            "on. Raise data.seq_len_tokens, or check that the records have assistant turns."
        )
    return documents, notes


def _tokenize(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    content = record.content
    if isinstance(content, Chat):
        return chat_documents(tokenizer, content, record.where)
    if tokenizer.eos_token_id is None:
        raise DataError(
            "tokenizer: no end-of-text token; expected one to close documents. Set eos_token in tokenizer_config.json."
        )
    eos = int(tokenizer.eos_token_id)
    if isinstance(content, PromptResponse):
        prompt_ids = raw_tokens(tokenizer, content.prompt)
        target_ids = raw_tokens(tokenizer, str(content.response), start=False)
    else:
        prompt_ids = []
        target_ids = raw_tokens(tokenizer, content.text)
    # The data may contain the end-of-text token already.
    if target_ids[-1:] != [eos]:
        target_ids = [*target_ids, eos]
    return [(prompt_ids + target_ids, [False] * len(prompt_ids) + [True] * len(target_ids))]


def _split(token_ids: list[int], mask: list[bool], seq_len_tokens: int) -> list[Tokens]:
    return [
        (token_ids[start : start + seq_len_tokens], mask[start : start + seq_len_tokens])
        for start in range(0, len(token_ids), seq_len_tokens)
    ]


def _documents(pieces: list[Tokens], record: Record) -> list[Document]:
    return [
        Document(*piece, record.group, record.id if len(pieces) == 1 else f"{record.id}/{number}")
        for number, piece in enumerate(pieces)
    ]


def frequent_tokens(documents: Iterable[Document], size: int, vocab_size: int, always: Collection[int]) -> list[int]:
    """Return the ``size`` tokens that are targets most often, in ascending order.

    Tokens with equal counts, including tokens that do not occur, are ranked by id: tokenizers assign low ids first.

    Args:
        always: Tokens that are chosen first whatever their count, such as end-of-text tokens.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        np.add.at(counts_V, document.input_ids[document.loss_mask], 1)
    token_V = np.arange(vocab_size)
    order_V = np.lexsort((token_V, -counts_V, ~np.isin(token_V, list(always))))
    return sorted(order_V[:size].tolist())


MAX_CONTINUATION_TOKENS = 256
"""Most tokens of a plain text that become its prompt."""


@dataclass(frozen=True)
class Prompt:
    id: str
    group: str
    prompt_ids: tuple[int, ...]
    task: str = ""
    """The task of a suite's prompt; empty for a prompt of a run."""


def build_prompts(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return each record's prompt: a chat without its last assistant turn, a pair's prompt, a plain text's first half.

    Of a text at most ``MAX_CONTINUATION_TOKENS`` are taken; texts of fewer than two tokens are left out.
    """
    prompts = (
        Prompt(record.id, record.group, tuple(_prompt_ids(record, tokenizer)), record.task) for record in records
    )
    return [prompt for prompt in prompts if prompt.prompt_ids]


def template_notes(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a sentence for all that the records' text is without: the template itself, columns, variables.

    Of the template's variables, those that turn thinking on or off are told where no record sets them.
    """
    known = template_variables(tokenizer)
    raw = sum(not isinstance(record.content, Chat) for record in records) if tokenizer.chat_template else 0
    writes_calls = "tool_calls" in str(tokenizer.chat_template)
    unread, ignored, given = Counter[str](), Counter[str](), set[str]()
    for record in records:
        if isinstance(record.content, Chat):
            given.update(record.content.variables)
            unread.update(known.intersection(record.unread))
            ignored.update(record.content.variables.keys() - known)
            if not writes_calls and any("tool_calls" in message for message in record.content.messages):
                ignored["tool_calls"] += 1
        elif isinstance(record.content, PromptResponse):
            unread.update(column for column in record.unread if column in CHAT_COLUMNS)
    kinds = (
        (unread, "is not put into their text; a chat template gets what chat_template_kwargs has"),
        (ignored, "the chat template does not read"),
    )
    notes = [f"{raw} of {len(records)} records are raw text, without the chat template"] if raw else []
    if raw < len(records):
        notes += [
            f"no record sets {name}, which the chat template reads" for name in sorted(known - given) if "think" in name
        ]
    return notes + [
        f"{count} of {len(records)} records have {name}, which {what}"
        for names, what in kinds
        for name, count in sorted(names.items())
    ]


Asked = TypeVar("Asked", Record, Prompt)


def choose_prompts(prompts: Iterable[Asked], num_prompts: int | None, seed: int) -> list[Asked]:
    """Return ``num_prompts`` of the prompts (all for None, or if there are fewer), chosen at random by ``seed``.

    A prompt's rank depends on its id and the seed alone, so a larger number only adds prompts.
    """
    return sorted(prompts, key=lambda prompt: (stable_share(prompt.id, seed), prompt.id))[:num_prompts]


def choose_evenly(prompts: Sequence[Prompt], num_prompts: int, seed: int) -> list[Prompt]:
    """Return ``num_prompts`` of the prompts (all, if there are fewer), as evenly over their groups as possible.

    Every group gives one prompt before any gives a second. A larger number only adds prompts.
    """
    taken = Counter[str]()
    turns: list[tuple[int, Prompt]] = []
    for prompt in choose_prompts(prompts, None, seed):
        turns.append((taken[prompt.group], prompt))
        taken[prompt.group] += 1
    return [prompt for _, prompt in sorted(turns, key=lambda turn: turn[0])[:num_prompts]]


def _prompt_ids(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    content = record.content
    if isinstance(content, Chat):
        messages = content.prompt_messages()
        if not messages:
            raise DataError(f"{record.where}: begins with its only assistant turn; expected a prompt. Remove it.")
        prompt_ids = chat_prompt_tokens(tokenizer, messages, record.where, content.variables)
    elif isinstance(content, PromptResponse):
        prompt_ids = raw_tokens(tokenizer, content.prompt)
    else:
        token_ids = raw_tokens(tokenizer, content.text)
        return token_ids[: min(len(token_ids) // 2, MAX_CONTINUATION_TOKENS)]
    if not prompt_ids:
        raise DataError(f"{record.where}: the prompt is empty; expected at least one token. Fix or remove the record.")
    return prompt_ids


def chat_documents(tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str) -> list[Tokens]:
    """Return the documents of a chat: every assistant turn is a target once, after the history it was generated from.

    A chat gives one document if its template renders a turn the same way whatever follows, else as few as possible.

    Returns:
        For each document its token ids and a mask of the assistant's tokens, thinking included, that are targets there.

    Raises:
        DataError: There is no chat template, it refuses the messages, it does not render a turn after the prompt for
            it, or the tokenizer does not return the character offsets of its tokens.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{where}: the tokenizer ({type(tokenizer).__name__}) does not give the place of its tokens in the text; "
            "expected one that does. Add 'data.regenerate={}': the trunk answers the prompts."
        )
    turns = [
        _turn(tokenizer, replace(chat, messages=chat.messages[: index + 1]), f"{where}, message {index + 1}")
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant"
    ]
    documents = []
    while turns:
        last = turns[-1]
        spans = [turn.span for turn in turns if last.text.startswith(turn.text)]
        turns = [turn for turn in turns if not last.text.startswith(turn.text)]
        encoded = tokenizer(last.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = [any(first <= start < end for first, end in spans) for start, _ in encoded["offset_mapping"]]
        documents.append((list(encoded["input_ids"]), mask))
    return documents[::-1]


class _Turn(NamedTuple):
    """An assistant turn.

    Args:
        text: The chat, rendered up to the end of the turn.
        span: First and past-the-last character of the assistant's text.
    """

    text: str
    span: tuple[int, int]


def _turn(tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str) -> _Turn:
    before = render_chat(tokenizer, chat.messages[:-1], where, chat.variables, add_generation_prompt=True)
    if before.rstrip().endswith(THINKING_ENDS):
        # A prompt that closes the thinking asks for a turn without any.
        chat = replace(chat, messages=(*chat.messages[:-1], _without_thinking(chat.messages[-1])))
    text = render_chat(tokenizer, chat.messages, where, chat.variables, add_generation_prompt=False)
    spoken = _restored(chat.messages[-1], before, text)
    if spoken is not None:
        return _Turn(before + spoken, (len(before), len(before + spoken)))
    start = shared_start(before, text)
    # A generation prompt may open the thinking of a turn that has none.
    opening = before.rstrip().removesuffix(THINKING_STARTS)
    if start < len(before) and opening != before.rstrip() and text.startswith(opening):
        start = len(opening)
    elif start < len(before):
        raise DataError(
            f"{where}: the chat template does not write this assistant turn after the prompt for it; expected the text "
            "that is generated. Add 'data.regenerate={}': the trunk answers the prompts."
        )
    # White space after the end-of-turn token belongs to the template: the model stops before it.
    return _Turn(text, (start, len(text.rstrip())))


def _restored(message: Message, before: str, text: str) -> str | None:
    """Return a turn as the model generates it if the template drops or doubles its thinking, else None.

    Args:
        text: The chat up to and including the turn, as the template renders it.
    """
    written = text[shared_start(before, text) :]
    is_opened = before.rstrip().endswith(THINKING_STARTS)
    thinking, _, answer = _said(message, written, is_opened).rpartition(THINKING_ENDS)
    thinking = thinking.lstrip().removeprefix(THINKING_STARTS)
    is_written = thinking.strip() in written and written.count(THINKING_STARTS) + is_opened <= 1
    place = written.rfind(answer.strip())
    if not thinking.strip() or is_written or not answer.strip() or place < 0:
        return None
    if not is_opened:
        thinking = THINKING_STARTS + thinking
    elif before.endswith("\n"):
        thinking = thinking.lstrip("\n")
    # The end-of-turn text is all that the template writes after the answer.
    end = written[place + len(answer.strip()) :].rstrip()
    return f"{thinking}{THINKING_ENDS}{answer.rstrip()}{end}"


def _without_thinking(message: Message) -> Message:
    *thinking, answer = message["content"].rpartition(THINKING_ENDS)
    others = {name: value for name, value in message.items() if name not in ("reasoning_content", "reasoning")}
    return {**others, "content": answer.lstrip("\n") if any(thinking) else answer}


def _said(message: Message, written: str, is_opened: bool) -> str:
    """Return a turn with its thinking inline, in the form that the prompt or the template shows."""
    content = message["content"]
    reasoning = message.get("reasoning_content")
    if reasoning and is_opened:
        return f"\n{reasoning}\n{THINKING_ENDS}\n\n{content}"
    if reasoning and THINKING_STARTS + THINKING_ENDS in written:
        return f"{THINKING_STARTS}{reasoning}{THINKING_ENDS}{content}"
    return content


def shared_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of characters or tokens at their start that two texts share."""
    if second[: len(first)] == first:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(second))
