"""Turn text and chats into token ids, and find the tokens that the assistant says.

Which tokens are the assistant's comes from the template's own ``{% generation %}`` marks where it has them. Otherwise
it comes from rendering the chat up to each assistant turn, as a server does before it generates, and once more with
the turn: what was added is the assistant's.

Many templates drop the thinking of earlier turns. What the model says at a turn is said after the history as it is
written then, so a turn that is written differently once the chat goes on is learnt in a document of its own, which ends
with it. Some templates drop the thinking of every turn, or open it twice: there it is written as the model says it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from mtp_train.data.records import Message
from mtp_train.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING_STARTS, THINKING_ENDS = "<think>", "</think>"


def raw_tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, start: bool = True) -> list[int]:
    """Return the token ids of raw text, without the end-of-text token that some tokenizers add.

    Args:
        tokenizer: The trunk's.
        text: Raw text.
        start: Whether the text opens a document (begin-of-text is added where the tokenizer has that habit).
    """
    token_ids: list[int] = tokenizer(text, add_special_tokens=start, verbose=False)["input_ids"]
    is_closed = bool(token_ids) and token_ids[-1] == tokenizer.eos_token_id
    return token_ids[:-1] if is_closed and not text.endswith(str(tokenizer.eos_token)) else token_ids


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


def chat_prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str) -> list[int]:
    """Return the token ids of a chat up to where the assistant is to speak.

    Raises:
        DataError: There is no chat template, or it refuses the messages.
    """
    _template(tokenizer, where)
    return _tokenize(tokenizer, _render(tokenizer, messages, where, add_generation_prompt=True))


def chat_documents(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str
) -> list[tuple[list[int], list[bool]]]:
    """Return texts in which every assistant turn is learnt once, after the history that it was said after.

    One text for a chat whose template writes a turn the same way whatever follows; else as few as there can be.

    Returns:
        For each text its token ids, and which of them the assistant says there for the first time (thinking included).

    Raises:
        DataError: There is no chat template, it refuses the messages or does not write a turn after the prompt for it,
            or the tokenizer cannot say where its tokens lie in the text.
    """
    template = _template(tokenizer, where)
    if not tokenizer.is_fast:
        raise DataError(
            f"{where}: the tokenizer ({type(tokenizer).__name__}) does not give the place of its tokens in the text; "
            "expected one that does, to tell the assistant's tokens apart. Use data.regenerate, or prompt and response "
            "records."
        )
    is_marked = bool(GENERATION_MARK.search(template))
    turns = [
        _turn(tokenizer, messages[: index + 1], is_marked, f"{where}, message {index + 1}")
        for index, message in enumerate(messages)
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
        messages: Those up to it, and it.
        text: The chat up to its end.
        span: The first and the past-the-last character of what is said.
        is_marked: Whether the template's marks say which part of the span it is.
    """

    messages: Sequence[Message]
    text: str
    span: tuple[int, int]
    is_marked: bool


def _turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], is_marked: bool, where: str) -> _Turn:
    before = _render(tokenizer, messages[:-1], where, add_generation_prompt=True)
    text = _render(tokenizer, messages, where, add_generation_prompt=False)
    spoken = _restored(messages[-1], before, text)
    if spoken is not None:
        return _Turn(messages, before + spoken, (len(before), len(before + spoken)), False)
    start = _shared(before, text)
    # A prompt may open the thinking of a turn that has none.
    opening = before.rstrip().removesuffix(THINKING_STARTS)
    if start < len(before) and opening != before.rstrip() and text.startswith(opening):
        start = len(opening)
    elif start < len(before) and not is_marked:
        raise DataError(
            f"{where}: the chat template does not write this assistant turn after the prompt for it; expected the text "
            "that is generated. Use data.regenerate, or prompt and response records."
        )
    # White space after the end-of-turn token belongs to the template: the model stops before it.
    return _Turn(messages, text, (start, len(text.rstrip())), is_marked)


def _restored(message: Message, before: str, text: str) -> str | None:
    """Return what the model says at a turn whose thinking the template drops or doubles; None where it writes it well.

    Args:
        message: The turn.
        before: The prompt for it.
        text: The chat through the turn, as the template writes it.
    """
    written = text[_shared(before, text) :]
    is_opened = before.rstrip().endswith(THINKING_STARTS)
    thinking, _, answer = _said(message, written, is_opened).rpartition(THINKING_ENDS)
    thinking = thinking.lstrip().removeprefix(THINKING_STARTS)
    is_written = thinking.strip() in written and written.count(THINKING_STARTS) + is_opened <= 1
    place = written.rfind(answer.strip())
    # A prompt that closes the thinking asks for a turn without any.
    is_closed = before.rstrip().endswith(THINKING_ENDS)
    if not thinking.strip() or is_written or is_closed or not answer.strip() or place < 0:
        return None
    if not is_opened:
        thinking = THINKING_STARTS + thinking
    elif before.endswith("\n"):
        thinking = thinking.lstrip("\n")
    # What the template writes after the answer ends the turn.
    end = written[place + len(answer.strip()) :].rstrip()
    return f"{thinking}{THINKING_ENDS}{answer.rstrip()}{end}"


def _said(message: Message, written: str, is_opened: bool) -> str:
    """Return a turn with its thinking inline, as the prompt or the template shows that the model writes it."""
    content: str = message["content"]
    reasoning = message.get("reasoning_content")
    if reasoning and is_opened:
        return f"\n{reasoning}\n{THINKING_ENDS}\n\n{content}"
    if reasoning and THINKING_STARTS + THINKING_ENDS in written:
        return f"{THINKING_STARTS}{reasoning}{THINKING_ENDS}{content}"
    return content


def _shared(first: str, second: str) -> int:
    """Return how many characters two texts start with in common."""
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
    """Return the tokens of a chat up to a turn, and which of those in spans the template marks."""
    encoded: Any = tokenizer.apply_chat_template(
        list(turn.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    token_ids, mask = _tokens_and_mask(tokenizer, turn.text, spans)
    return token_ids, [bool(mark) and inside for mark, inside in zip(encoded["assistant_masks"], mask, strict=True)]


def _template(tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            f"{where}: a chat, and the tokenizer has no chat template; expected one to write the chat with. Add "
            "chat_template.jinja to the trunk, or use prompt and response records."
        ) from error
    return template


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str, *, add_generation_prompt: bool
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise _refused(where, error) from error
    return str(text)


def _refused(where: str, error: TemplateError) -> DataError:
    return DataError(
        f"{where}: the chat template refuses it ({error}); expected messages it can write. Fix or remove the record."
    )


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template writes begin-of-text itself.
    return raw_tokens(tokenizer, text, start=False)
