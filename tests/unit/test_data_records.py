from __future__ import annotations

import json
import re

import pytest

from mtp_train.data.records import (
    PlainText,
    Record,
    parse_content,
    parse_messages,
)
from mtp_train.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def test_sharegpt_turns_become_roles_and_content() -> None:
    chat = parse_messages([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "x")
    assert chat.messages == (USER, ASSISTANT)


@pytest.mark.parametrize("keys", [("from", "value"), ("role", "content")])
def test_sharegpt_calls_and_observations_become_tool_calls(keys: tuple[str, str]) -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": '{"a": 2}'}, {"name": "h"}]
    turns = [*(("function_call", json.dumps(one)) for one in (calls[0], calls)), ("observation", "18C")]
    first, both, seen = parse_messages([dict(zip(keys, turn, strict=True)) for turn in turns], "x").messages
    served = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("f", {"a": 1}), ("g", {"a": 2}), ("h", {}))
    ]
    assert first == {"role": "assistant", "content": "", "tool_calls": served[:1]}
    assert both == {"role": "assistant", "content": "", "tool_calls": served}
    assert seen == {"role": "tool", "content": "18C"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tools": "lookup"}, "f: tools are 'lookup'; expected a list of objects, or its JSON text."),
        ({"tools": ["lookup"]}, "f: tools are ['lookup']; expected a list of objects"),
        ({"chat_template_kwargs": "fast"}, "f: chat_template_kwargs are 'fast'; expected an object."),
        ({"system": 3}, "f: system is 3; expected text."),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, USER]}, "f: a system column beside a system"),
        ({"messages": [{"from": "function_call", "value": "f(1)"}]}, "f, message 1: function_call is 'f(1)'; expected"),
        ({"messages": [{"from": "function_call", "value": "[" * 1000}]}, "f, message 1: function_call is '[[["),
        ({"tools": [{"name": "\ud83d"}]}, "f: a value has half of a surrogate pair"),
    ],
)
def test_what_belongs_to_a_chat_is_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        parse_content({"messages": [USER], **values}, "f")


def test_nulls_that_arrow_fills_in_are_dropped_at_every_level() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}
    chat = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}], "x")
    assert chat.messages == (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    )


def test_arguments_in_the_call_itself_are_parsed_too() -> None:
    (message,) = parse_messages(
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}], "x"
    ).messages
    assert message["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


def test_text_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there", "image": None}]
    assert parse_messages([{"role": "user", "content": parts}], "x").messages == (
        {"role": "user", "content": "hi there"},
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hi", "f.jsonl, record 3: messages are 'hi'; expected a list of at least one message."),
        (None, "f.jsonl, record 3: messages are missing; expected a list"),
        ([], "f.jsonl, record 3: messages are []; expected a list"),
        ([USER, "hi"], "f.jsonl, record 3, message 2: 'hi'; expected an object with role and content."),
        ([{"role": "bot", "content": "hi"}], "message 1: role 'bot'; expected one of system, developer, user,"),
        ([{"content": "hi"}], "message 1: role missing; expected one of"),
        ([USER, {"role": "assistant"}], "record 3, message 2: content is missing; expected text."),
        ([{"role": "user", "content": [{"type": "image"}]}], "content is [{'type': 'image'}]; expected text."),
        ([{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}], "expected text."),
        ([{"from": "human"}], "message 1: content is missing; expected text."),
        ([{**USER, "tool_calls": 7}], "message 1: tool_calls are 7; expected a list of objects."),
        ([{**USER, "tool_calls": ["f"]}], "message 1: tool_calls are ['f']; expected a list of objects."),
        ([{"role": ["user"], "content": "hi"}], "message 1: role ['user']; expected one of"),
        ([{"from": ["gpt"], "value": "hi"}], "message 1: role ['gpt']; expected one of"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(value: object, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        parse_messages(value, "f.jsonl, record 3")


def test_long_values_are_quoted_briefly() -> None:
    with pytest.raises(DataError, match=re.escape("xxx...; expected a list")):
        parse_messages("x" * 1000, "f")


def test_a_record_names_its_place() -> None:
    assert Record("data/c#sharp.jsonl#12", "g", PlainText("a")).where == "data/c#sharp.jsonl, record 12"
