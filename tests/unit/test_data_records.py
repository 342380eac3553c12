from __future__ import annotations

import re

import pytest

from mtp_train.data.records import Chat, PlainText, PromptResponse, Record, content_group, parse_messages, parse_text
from mtp_train.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def test_sharegpt_turns_become_roles_and_content() -> None:
    chat = parse_messages([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "x")
    assert chat.messages == (USER, ASSISTANT)


def test_nulls_that_arrow_fills_in_are_dropped_at_every_level() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}
    chat = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}], "x")
    assert chat.messages == (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    )


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


def test_text_must_be_text() -> None:
    assert parse_text("a", "text", "f") == "a"
    with pytest.raises(DataError, match="f, record 1: prompt is missing; expected text"):
        parse_text(None, "prompt", "f, record 1")


def test_a_prompt_goes_up_to_the_last_assistant_turn() -> None:
    assert Chat((USER, ASSISTANT, USER, ASSISTANT)).prompt_messages() == (USER, ASSISTANT, USER)
    assert Chat((USER,)).prompt_messages() == (USER,)
    assert Chat((USER, ASSISTANT, USER)).prompt_messages() == (USER, ASSISTANT, USER)
    assert Chat((ASSISTANT,)).prompt_messages() == ()


def test_records_that_repeat_a_prompt_share_a_group() -> None:
    other_answer = {"role": "assistant", "content": "good day"}
    assert content_group(Chat((USER, ASSISTANT))) == content_group(Chat((USER, other_answer)))
    assert content_group(PromptResponse("a", "b")) == content_group(PromptResponse("a", "c"))
    assert content_group(PromptResponse("a", "b")) != content_group(PromptResponse("b", "b"))
    assert content_group(PlainText("a")) != content_group(PlainText("b"))


def test_a_record_names_its_place() -> None:
    assert Record("data/c#sharp.jsonl#12", "g", PlainText("a")).where == "data/c#sharp.jsonl, record 12"
