"""Tokenise text and chats, and find the tokens that the assistant generates.

The assistant's tokens come from the template's own ``{% generation %}`` marks if it has them. Otherwise the chat is
rendered up to each assistant turn, as a server does before it generates, and again with the turn: the text that was
added is the assistant's.

Many templates drop the thinking of earlier turns, so a turn is rendered differently once the chat continues. The model
generates a turn after the history as it is rendered at that moment. Such a turn becomes the end of a document of its
own. Some templates drop the thinking of every turn, or open it twice: there the thinking is written as the model
generates it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mtp_train.data.records import Chat, Message
from mtp_train.errors import DataError
from mtp_train.trunk.tokenizer import chat_template, render_chat, template_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING_STARTS, THINKING_ENDS = "<think>", "</think>"


def eos_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-text token.

    Raises:
        DataError: The tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "tokenizer: no end-of-text token; expected one to close documents with. Set eos_token in the trunk's "
            "tokenizer_config.json."
        )
    return int(tokenizer.eos_token_id)


def chat_documents(tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str) -> list[tuple[list[int], list[bool]]]:
    """Return the documents of a chat: every assistant turn is a target once, after the history it was generated from.

    A chat gives one document if its template renders a turn the same way whatever follows, else as few as possible.

    Returns:
        For each document its token ids and a mask of the assistant's tokens, thinking included, that are targets there.

    Raises:
        DataError: There is no chat template, it refuses the messages, it does not render a turn after the prompt for
            it, or the tokenizer does not return the character offsets of its tokens.
    """
    template = chat_template(tokenizer, where, chat.variables)
    if not tokenizer.is_fast:
        raise DataError(
            f"{where}: the tokenizer ({type(tokenizer).__name__}) does not give the place of its tokens in the text; "
            "expected one that does, to tell the assistant's tokens apart. Use data.regenerate, or prompt and response "
            "records."
        )
    is_marked = bool(GENERATION_MARK.search(template))
    turns = [
        _turn(tokenizer, replace(chat, messages=chat.messages[: index + 1]), is_marked, f"{where}, message {index + 1}")
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant"
    ]
    documents = []
    while turns:
        last = turns[-1]
        spans = [turn.span for turn in turns if last.text.startswith(turn.text)]
        turns = [turn for turn in turns if not last.text.startswith(turn.text)]
        if last.is_marked:
            documents.append(_marked(tokenizer, last, spans))
        else:
            documents.append(_tokens_and_mask(tokenizer, last.text, spans))
    return documents[::-1]


class _Turn(NamedTuple):
    """An assistant turn.

    Args:
        chat: The chat up to and including the turn.
        text: The chat, rendered up to the end of the turn.
        span: First and past-the-last character of the assistant's text.
        is_marked: Whether the template's marks select a part of the span.
    """

    chat: Chat
    text: str
    span: tuple[int, int]
    is_marked: bool


def _turn(tokenizer: PreTrainedTokenizerBase, chat: Chat, is_marked: bool, where: str) -> _Turn:
    before = render_chat(tokenizer, chat.messages[:-1], where, chat.variables, add_generation_prompt=True)
    if before.rstrip().endswith(THINKING_ENDS):
        # A prompt that closes the thinking asks for a turn without any.
        chat = replace(chat, messages=(*chat.messages[:-1], _without_thinking(chat.messages[-1])))
    text = render_chat(tokenizer, chat.messages, where, chat.variables, add_generation_prompt=False)
    spoken = _restored(chat.messages[-1], before, text)
    if spoken is not None:
        return _Turn(chat, before + spoken, (len(before), len(before + spoken)), False)
    start = _shared(before, text)
    # A generation prompt may open the thinking of a turn that has none.
    opening = before.rstrip().removesuffix(THINKING_STARTS)
    if start < len(before) and opening != before.rstrip() and text.startswith(opening):
        start = len(opening)
    elif start < len(before) and not is_marked:
        raise DataError(
            f"{where}: the chat template does not write this assistant turn after the prompt for it; expected the text "
            "that is generated. Use data.regenerate, or prompt and response records."
        )
    # White space after the end-of-turn token belongs to the template: the model stops before it.
    return _Turn(chat, text, (start, len(text.rstrip())), is_marked)


def _restored(message: Message, before: str, text: str) -> str | None:
    """Return a turn as the model generates it if the template drops or doubles its thinking, else None.

    Args:
        message: The turn.
        before: The prompt for the turn.
        text: The chat up to and including the turn, as the template renders it.
    """
    written = text[_shared(before, text) :]
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
    content: str = message["content"]
    reasoning = message.get("reasoning_content")
    if reasoning and is_opened:
        return f"\n{reasoning}\n{THINKING_ENDS}\n\n{content}"
    if reasoning and THINKING_STARTS + THINKING_ENDS in written:
        return f"{THINKING_STARTS}{reasoning}{THINKING_ENDS}{content}"
    return content


def _shared(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(second))


def _tokens_and_mask(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), [any(first <= start < last for first, last in spans) for start in starts]


def _marked(
    tokenizer: PreTrainedTokenizerBase, turn: _Turn, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a chat up to a turn, and a mask of the tokens in spans that the template marks."""
    with template_errors(f"message {len(turn.chat.messages)}"):
        encoded: Any = tokenizer.apply_chat_template(
            list(turn.chat.messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **turn.chat.variables,
        )
    token_ids, mask = _tokens_and_mask(tokenizer, turn.text, spans)
    return token_ids, [bool(mark) and inside for mark, inside in zip(encoded["assistant_masks"], mask, strict=True)]
