"""Records of a data source: chats, prompt and response pairs, or plain text.

A record's content is checked here once, so that tokenisation can rely on it. Chats are brought into the form in which a
server hands them to the chat template: roles of OpenAI, tools as a list, and arguments of tool calls as objects.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtp_train.errors import DataError, UnsupportedRecordError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
"""Columns with what a record refers to beside its text. Tokens of the text alone would not be those that are served."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Hold messages with `role` and `content`; further keys (`tool_calls`, ...) go to the chat template as they are."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template reads beside the messages: ``tools``, ``enable_thinking`` and the like."""

    def prompt_messages(self) -> tuple[Message, ...]:
        """Return the messages to reply to: all but a final assistant turn."""
        return self.messages[:-1] if self.messages[-1]["role"] == "assistant" else self.messages


@dataclass(frozen=True)
class PromptResponse:
    """Hold raw text on both sides: no chat template is applied to either. A prompt to answer has no response."""

    prompt: str
    response: str | None = None


@dataclass(frozen=True)
class PlainText:
    text: str


Content = Chat | PromptResponse | PlainText


@dataclass(frozen=True)
class Record:
    """One record of a source.

    Args:
        id: ``"{source}#{number}"``, numbers counting from 1; unique over the sources of a run.
        group: Records of one group are held out together.
        content: A chat, a pair or a text.
        unread: The columns of the record that have a value and are no part of the content.
        task: The task of a suite's record; empty for a record of a run.
        place: Its file, and its number there; empty where the source is one file, or is not read by file.
    """

    id: str
    group: str
    content: Content
    unread: tuple[str, ...] = ()
    task: str = ""
    place: str = ""

    @property
    def where(self) -> str:
        """Name the record in an error message."""
        source, _, number = self.id.rpartition("#")
        return self.place or f"{source}, record {number}"


def has_response(content: Content) -> bool:
    """Return whether a content has text to train on: an assistant's turn, a response, or plain text."""
    if isinstance(content, Chat):
        return any(message["role"] == "assistant" for message in content.messages)
    return isinstance(content, PlainText) or content.response is not None


def with_variables(record: Record, defaults: Mapping[str, Any]) -> Record:
    """Return a record whose chat hands these variables to the template where it has none of that name."""
    if not defaults or not isinstance(record.content, Chat):
        return record
    return replace(record, content=replace(record.content, variables={**defaults, **record.content.variables}))


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


def parse_content(values: Mapping[str, object], where: str) -> Content:
    """Check the content of a record.

    Args:
        values: The values of a format's columns (``FORMATS`` in ``sources.py``), and of those beside them: ``system``,
            ``tools`` and ``chat_template_kwargs``.

    Raises:
        UnsupportedRecordError: A message has image, audio or other parts that are not text.
        DataError: A value is of another type than its column has.
    """
    # All of them at once: templates may write any field of a message.
    _require_unicode(json.dumps(values, ensure_ascii=False, default=str), "a value", where)
    if "text" in values:
        return PlainText(parse_text(values["text"], "text", where).strip("\n"))
    prompt = values.get("prompt")
    response = values.get("response")
    if "instruction" in values:
        asked = [name for name in ("instruction", "input") if name == "instruction" or values.get(name)]
        prompt = [{"role": "user", "content": "\n".join(parse_text(values[name], name, where) for name in asked)}]
        response = values.get("output")
    if "prompt" in values and not isinstance(prompt, (list, tuple)):
        answer = None if response is None else parse_text(response, "response", where)
        return PromptResponse(parse_text(prompt, "prompt", where), answer)
    messages = values.get("messages")
    if "turns" in values:
        turns = values["turns"]
        if not isinstance(turns, (list, tuple)) or not turns:
            raise _refused(where, f"turns are {_shown(turns)}", "a list of texts, of which the first is asked")
        messages = [{"role": "user", "content": turns[0]}]
    if isinstance(prompt, (list, tuple)):
        answered = response if isinstance(response, (list, tuple)) else [{"role": "assistant", "content": response}]
        messages = [*prompt, *(answered if response is not None else ())]
    chat = parse_messages(messages, where)
    variables = _variables(values, where)
    system = values.get("system")
    if not system:
        return replace(chat, variables=variables)
    if chat.messages[0]["role"] == "system":
        raise _refused(where, "a system column beside a system message", "one of them")
    return Chat(({"role": "system", "content": parse_text(system, "system", where)}, *chat.messages), variables)


def _variables(values: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return a record's ``chat_template_kwargs`` and ``tools``, each of which may be JSON text."""
    given = json_or_text(_without_nulls(values.get("chat_template_kwargs")))
    if given and not isinstance(given, Mapping):
        raise _refused(where, f"chat_template_kwargs are {_shown(given)}", "an object")
    tools = json_or_text(_without_nulls(values.get("tools")))
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise _refused(where, f"tools are {_shown(tools)}", "a list of objects, or its JSON text")
    return {**(given or {}), **({"tools": tools} if tools else {})}


def parse_messages(value: object, where: str) -> Chat:
    """Check a chat and bring ShareGPT's ``from``/``value`` and its roles into OpenAI's.

    Raises:
        UnsupportedRecordError: A message has image, audio or other parts that are not text.
        DataError: The value is not a list of messages, or a message lacks its role or its text.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise _refused(where, f"messages are {_shown(value)}", "a list of at least one message")
    return Chat(tuple(_parse_message(message, f"{where}, message {i}") for i, message in enumerate(value, start=1)))


def parse_text(value: object, field: str, where: str) -> str:
    """Check that a field holds text.

    Raises:
        DataError: It holds something else, or nothing.
    """
    if not isinstance(value, str):
        raise _refused(where, f"{field} is {_shown(value)}", "text")
    _require_unicode(value, field, where)
    return value


def _require_unicode(text: str, field: str, where: str) -> None:
    """Refuse unpaired surrogates: JSON allows them, UTF-8 does not, and tokenizers would not name the record."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(
            where, f"{field} has half of a surrogate pair at character {error.start + 1}", "whole characters"
        ) from None


def _parse_message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise _refused(where, _shown(value), "an object with role and content")
    # Arrow gives every message the keys of all messages, filled with null; templates would print them.
    message = _without_nulls(value)
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    if isinstance(role, str):
        message["role"] = SHAREGPT_ROLES.get(role, role)
    if message.get("role") not in ROLES:
        raise _refused(where, f"role {_shown(role)}", f"one of {', '.join(ROLES)}")
    if role == "function_call":
        # The tool calls of ShareGPT: one call or a list of calls as JSON text.
        found = json_or_text(message.get("content"))
        calls = found if isinstance(found, list) else [found]
        if not all(isinstance(call, Mapping) and "name" in call for call in calls):
            raise _refused(where, f"function_call is {_shown(message.get('content'))}", "JSON with name and arguments")
        message |= {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    if "tool_calls" in message:
        message["tool_calls"] = _parse_calls(message["tool_calls"], where)
        message.setdefault("content", "")
    return {**message, "content": _text_of(message.get("content"), where)}


def _parse_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects: as vLLM, SGLang and transformers serve them to the template.

    OpenAI's API has the arguments as JSON text, which ``tojson`` would encode twice. Text that is not JSON stays.

    Raises:
        DataError: The value is not a list of objects, over which chat templates loop.
    """
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise _refused(where, f"tool_calls are {_shown(value)}", "a list of objects")
    return [_parse_call(call) for call in value]


def _parse_call(call: Mapping[str, Any]) -> dict[str, Any]:
    # Some data has the function's name and arguments in the call itself.
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    parsed = {**function, "arguments": json_or_text(function.get("arguments") or {})}
    return parsed if function is call else {**call, "function": parsed}


def json_or_text(value: object) -> Any:
    """Return the value of JSON text; anything else, text that is no JSON included, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def require_text_only(row: Mapping[str, object], where: str) -> None:
    """Check that the columns beside a record's text, such as ``images``, hold nothing.

    Raises:
        UnsupportedRecordError: One of :data:`MEDIA_COLUMNS` does.
    """
    for column in MEDIA_COLUMNS:
        if row.get(column):
            raise _refused(where, f"{column} has a value", "text alone", UnsupportedRecordError)


def _text_of(content: object, where: str) -> str:
    """Return the text of a message, whose content may be a list of parts, as in chats of vision-language models."""
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content] if isinstance(content, list) else []
    if parts and all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    types = [part.get("type") for part in parts if part.get("type") != "text"]
    kind = UnsupportedRecordError if types and all(isinstance(one, str) for one in types) else DataError
    raise _refused(where, f"content is {_shown(content)}", "text", kind)


def _without_nulls(value: Any) -> Any:
    """Drop the null members of objects, at every level."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(member) for member in value]
    return value


def _refused(where: str, found: str, expected: str, kind: type[DataError] = DataError) -> DataError:
    return kind(f"{where}: {found}; expected {expected}. Fix or remove the record.")


def _shown(value: object) -> str:
    """Quote a value briefly for an error message."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
