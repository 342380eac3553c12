"""Turn text and chats into token ids, and find the tokens that the assistant says.

Which tokens are the assistant's comes from the template's own ``{% generation %}`` marks where it has them. Otherwise
it comes from rendering the chat up to each assistant turn, as a server does before it generates, and once more with
the turn: what was added is the assistant's. That holds only where a template renders a turn the same way whatever
follows; templates that strip the thinking from earlier turns do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mtp_train.data.records import Message
from mtp_train.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


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


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a whole chat, and which of them the assistant says (thinking included).

    Raises:
        DataError: There is no chat template, it refuses the messages, it renders an assistant turn differently once
            more follows, or the tokenizer cannot say where its tokens lie in the text.
    """
    template = _template(tokenizer, where)
    if not tokenizer.is_fast:
        raise DataError(
            f"{where}: the tokenizer ({type(tokenizer).__name__}) does not give the place of its tokens in the text; "
            "expected one that does, to tell the assistant's tokens apart. Use data.regenerate, or prompt and response "
            "records."
        )
    if GENERATION_MARK.search(template):
        return _marked_tokens(tokenizer, messages, where)
    text = _render(tokenizer, messages, where, add_generation_prompt=False)
    spans = _assistant_spans(tokenizer, messages, text, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]]
    mask = [any(first <= start < last for first, last in spans) for start in starts]
    return list(encoded["input_ids"]), mask


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


def _marked_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], where: str
) -> tuple[list[int], list[bool]]:
    try:
        encoded: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except TemplateError as error:
        raise _refused(where, error) from error
    return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, where: str
) -> list[tuple[int, int]]:
    """Return the first and past-the-last character of every assistant turn within the rendered chat."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], where, add_generation_prompt=True)
        through = _render(tokenizer, messages[: index + 1], where, add_generation_prompt=False)
        if not (through.startswith(before) and text.startswith(through)):
            raise DataError(
                f"{where}, message {index + 1}: the chat template writes this assistant turn differently once the chat "
                "goes on (it may strip thinking); expected the same text as when it was generated. Use "
                "data.regenerate, or prompt and response records."
            )
        # White space after the end-of-turn token belongs to the template: the model stops before it.
        spans.append((len(before), len(through.rstrip())))
    return spans
