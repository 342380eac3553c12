"""Records of a data source: chats, prompt and response pairs, or plain text.

A record's content is checked here once, so that tokenisation can rely on it.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_train.errors import DataError, UnsupportedRecordError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
"""Columns with what a record refers to beside its text. Tokens of the text alone would not be those that are served."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Hold messages with `role` and `content`; further keys (`tool_calls`, ...) go to the chat template as they are."""

    messages: tuple[Message, ...]

    def prompt_messages(self) -> tuple[Message, ...]:
        """Return the messages to reply to: all but a final assistant turn."""
        return self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages


@dataclass(frozen=True)
class PromptResponse:
    """Hold raw text on both sides: no chat template is applied to either."""

    prompt: str
    response: str


@dataclass(frozen=True)
class PlainText:
    """Hold text in which every token is learned."""

    text: str


Content = Chat | PromptResponse | PlainText


@dataclass(frozen=True)
class Record:
    """One record of a source.

    Args:
        id: ``"{source}#{number}"``, numbers counting from 1; unique over the sources of a run.
        group: Records of one group are held out together.
        content: A chat, a pair or a text.
    """

    id: str
    group: str
    content: Content

    @property
    def where(self) -> str:
        """Name the record in an error message."""
        source, _, number = self.id.rpartition("#")
        return f"{source}, record {number}"


def content_group(content: Content) -> str:
    """Return the group of a record without a group field: a digest of :func:`grouping_text`."""
    return text_group(grouping_text(content))


def text_group(text: str) -> str:
    """Return the group of the records that have this text for their :func:`grouping_text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def grouping_text(content: Content) -> str:
    """Return the normalised text that groups a record without a group field.

    That is a chat's first user turn, a pair's prompt, or a plain text. The prefixes of one conversation thereby share a
    group, and so do records with the same prompt. System turns do not count: many conversations share one.
    """
    if isinstance(content, PlainText):
        return normalised(content.text)
    if isinstance(content, PromptResponse):
        return normalised(content.prompt)
    asked = next((message["content"] for message in content.messages if message["role"] == "user"), None)
    if asked is None:
        return json.dumps(content.prompt_messages(), sort_keys=True, default=str)
    return normalised(asked)


def normalised(text: str) -> str:
    """Return text in one case and one Unicode form, with single spaces and without punctuation at its end."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    end = len(words)
    while end and (words[end - 1] == " " or unicodedata.category(words[end - 1]).startswith("P")):
        end -= 1
    # Keep the punctuation of a text that has nothing else.
    return words[:end] or words


def parse_messages(value: object, where: str) -> Chat:
    """Check a chat and bring ShareGPT's ``from``/``value`` into ``role``/``content``.

    Raises:
        UnsupportedRecordError: A message has image, audio or other parts that are not text.
        DataError: The value is not a list of messages, or a message lacks its role or its text.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(
            f"{where}: messages are {_shown(value)}; expected a list of at least one message. Fix or remove the record."
        )
    return Chat(tuple(_parse_message(message, f"{where}, message {i}") for i, message in enumerate(value, start=1)))


def parse_text(value: object, field: str, where: str) -> str:
    """Check that a field holds text.

    Raises:
        DataError: It holds something else, or nothing.
    """
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is {_shown(value)}; expected text. Fix or remove the record.")
    _require_unicode(value, field, where)
    return value


def _require_unicode(text: str, field: str, where: str) -> None:
    """Refuse unpaired surrogates: JSON allows them, UTF-8 does not, and tokenizers would not name the record."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {field} has half of a surrogate pair at character {error.start + 1}; expected whole characters. "
            "Fix or remove the record."
        ) from None


def _parse_message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where}: {_shown(value)}; expected an object with role and content. Fix or remove the record."
        )
    # Arrow gives every message the keys of all messages, filled with null; templates would print them.
    message: Message = _without_nulls(value)
    if "from" in message and "role" not in message:
        sender = message.pop("from")
        message["role"] = SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where}: role {_shown(role)}; expected one of {', '.join(ROLES)}. Rename the role.")
    if "tool_calls" in message:
        _require_calls(message["tool_calls"], where)
        message.setdefault("content", "")
    message["content"] = _joined(message.get("content"))
    if not isinstance(message.get("content"), str):
        raise (UnsupportedRecordError if _has_other_parts(message["content"]) else DataError)(
            f"{where}: content is {_shown(message.get('content'))}; expected text. Fix or remove the record "
            "(image and audio parts are not supported)."
        )
    _require_unicode(message["content"], "content", where)
    if len(message) > 2:
        # Templates may write further fields.
        _require_unicode(json.dumps(message, ensure_ascii=False, default=str), "the message", where)
    return message


def _require_calls(value: object, where: str) -> None:
    """Refuse tool calls in another form than chat templates loop over."""
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise DataError(
            f"{where}: tool_calls are {_shown(value)}; expected a list of objects. Fix or remove the record."
        )


def require_text_only(row: Mapping[str, object], where: str) -> None:
    """Check that the columns beside a record's text, such as ``images``, hold nothing.

    Raises:
        UnsupportedRecordError: One of :data:`MEDIA_COLUMNS` does.
    """
    for column in MEDIA_COLUMNS:
        if row.get(column):
            raise UnsupportedRecordError(
                f"{where}: {column} has a value; expected text alone. Fix or remove the record (image, audio and video "
                "are not supported)."
            )


def _has_other_parts(content: object) -> bool:
    """Return whether content is a list of parts with types, and one of them is not text."""
    if not isinstance(content, list):
        return False
    types = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    return all(isinstance(one, str) for one in types) and any(one != "text" for one in types)


def _joined(content: object) -> object:
    """Join content in parts (the format of vision-language chats) to one text, if all parts are text."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if len(whole) == len(content) else content


def _without_nulls(value: Any) -> Any:
    """Drop the null members of objects, at every level."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(member) for member in value]
    return value


def _shown(value: object) -> str:
    """Quote a value briefly for an error message."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
