"""Conversations reach the chat template as a server hands them to it: tools, variables, arguments as objects.

The expected ids are those of ``tokenizer.apply_chat_template`` on the messages that a server would pass.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import CHATML, THINKS, byte_tokenizer
from json_files import write_rows
from mtp_train.checkpoints.tokenizer import require_variables, template_variables
from mtp_train.data.records import Chat, Record, parse_content, with_variables
from mtp_train.data.sources import load_records
from mtp_train.data.tokenize import build_prompts, template_notes, tokenize_records
from mtp_train.errors import DataError
from mtp_train.evaluation.grid import EvaluationGrid, grid_prompts

LOOPS_OVER_ARGUMENTS = THINKS.replace(
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}",
    "{% for name, value in call.function.arguments | items %}<{{ name }}={{ value }}>{% endfor %}",
)
"""Shaped after Qwen3-Coder."""
TOOLS_BESIDE_THE_USER = (
    "{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "<|im_start|>system\n{{ date_string | default('26 Jul 2024') }}"
    "{%- if tools and not tools_in_user_message %}{{ tools | tojson(indent=4) }}{%- endif %}<|im_end|>\n"
    "{%- for message in messages %}{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    '<|im_start|>assistant\n{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>\n'
    "{%- else %}<|im_start|>{{ message.role }}\n"
    "{%- if loop.first and tools and tools_in_user_message %}{{ tools | tojson(indent=4) }}{%- endif %}"
    "{{ message.content }}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""Shaped after Llama 3.1."""
TOOLS_BEFORE_THE_LAST_USER = (
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{%- endif %}[INST]{{ message.content }}[/INST]"
    "{%- elif message.tool_calls %}[TOOL_CALLS]{%- for call in message.tool_calls %}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{%- endfor %}<|im_end|>"
    "{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{%- else %}{{ message.content }}<|im_end|>{%- endif %}{%- endfor %}"
)
"""Shaped after Mistral: an earlier turn was generated with the tools elsewhere."""
TEMPLATES = {
    "thinks": THINKS,
    "loops over arguments": LOOPS_OVER_ARGUMENTS,
    "tools beside the user": TOOLS_BESIDE_THE_USER,
    "tools before the last user": TOOLS_BEFORE_THE_LAST_USER,
}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": {"city": "Paris", "days": None}}}


def call_with(arguments: object) -> dict[str, Any]:
    return {**CALL, "function": {"name": "lookup", "arguments": arguments}}


def conversation(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18C"},
        {"role": "assistant", "content": "It is 18."},
        {"role": "user", "content": "Thanks. And now?"},
        {"role": "assistant", "content": "The same."},
    ]


AS_LOGGED = conversation(call_with(json.dumps(CALL["function"]["arguments"])))  # type: ignore[index]
AS_SERVED = conversation(CALL)
GREETED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def record_of(**values: object) -> Record:
    return Record("f#1", "g", parse_content(values, "f, record 1"))


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_and_calls_are_rendered_as_the_template_does(name: str, tools: object) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    record = record_of(messages=AS_LOGGED, tools=tools)
    variables: dict[str, Any] = {"tools": TOOLS}
    documents, _ = tokenize_records([record], tokenizer, 4096)
    whole = tokenizer.apply_chat_template(AS_SERVED, return_dict=False, **variables)
    assert documents[-1].input_ids.tolist() == whole
    asked = tokenizer.apply_chat_template(AS_SERVED[:-1], add_generation_prompt=True, return_dict=False, **variables)
    (prompt,) = build_prompts([record], tokenizer)
    assert list(prompt.prompt_ids) == asked
    # Control: the same chat without its tools is another text.
    assert build_prompts([record_of(messages=AS_LOGGED)], tokenizer)[0].prompt_ids != prompt.prompt_ids
    # Each turn is learnt once, in the history that it was generated from.
    learnt = "".join(tokenizer.decode(document.input_ids[document.loss_mask]) for document in documents)
    assert learnt.count("lookup") == learnt.count("It is 18.") == learnt.count("The same.") == 1


def test_tools_that_move_with_the_last_user_give_each_turn_its_own_history() -> None:
    tokenizer = byte_tokenizer(TOOLS_BEFORE_THE_LAST_USER)
    documents, _ = tokenize_records([record_of(messages=AS_LOGGED, tools=TOOLS)], tokenizer, 4096)
    first, last = (str(tokenizer.decode(document.input_ids)) for document in documents)
    assert first.startswith("[AVAILABLE_TOOLS]")
    assert last.startswith("[INST]Weather?[/INST]")
    assert "[/AVAILABLE_TOOLS][INST]Thanks." in last


@pytest.mark.parametrize("name", ["thinks", "tools before the last user"])
def test_arguments_as_text_are_not_encoded_twice(name: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    texts = [
        str(tokenizer.decode(tokenize_records([record_of(messages=one)], tokenizer, 4096)[0][-1].input_ids))
        for one in (AS_LOGGED, AS_SERVED, conversation(call_with('{"city": ')))
    ]
    # Nulls of JSON text are values; a table's nulls are fillings of Arrow.
    assert '{"city": "Paris", "days": null}' in texts[0]
    assert '{"city": "Paris"}' in texts[1]
    # Control: text that is no JSON stays text.
    assert '\\"city' in texts[2] or '{"city": }' in texts[2]


@pytest.mark.parametrize("form", ["record", "record as text", "defaults"])
def test_thinking_can_be_switched_off(form: str) -> None:
    tokenizer = byte_tokenizer(THINKS)
    off: dict[str, object] = {"enable_thinking": False}
    given = {"record": off, "record as text": json.dumps(off), "defaults": None}[form]
    record = record_of(messages=GREETED, chat_template_kwargs=given)
    record = with_variables(record, off if form == "defaults" else {"enable_thinking": True})
    (prompt,) = build_prompts([record], tokenizer)
    asked = tokenizer.apply_chat_template(
        GREETED[:1], add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    assert list(prompt.prompt_ids) == asked
    assert str(tokenizer.decode(asked)).endswith("</think>\n\n")
    (document,), _ = tokenize_records([record], tokenizer, 512)
    assert tokenizer.decode(document.input_ids[document.loss_mask]) == "yes<|im_end|>"


def test_another_template_for_tools_is_used() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": THINKS}
    texts = [
        str(
            tokenizer.decode(list(build_prompts([record_of(messages=GREETED[:1], tools=one)], tokenizer)[0].prompt_ids))
        )
        for one in (None, [], TOOLS)
    ]
    assert ["# Tools" in text for text in texts] == [False, False, True]


def test_the_variables_of_a_template_are_found() -> None:
    assert template_variables(byte_tokenizer(THINKS)) == {"tools", "enable_thinking"}
    llama = {"tools", "tools_in_user_message", "date_string"}
    assert template_variables(byte_tokenizer(TOOLS_BESIDE_THE_USER)) == llama
    marked = "{% generation %}{{ eos_token }}{% break %}{% endgeneration %}{{ documents }}"
    assert template_variables(byte_tokenizer("{% for a in messages %}" + marked + "{% endfor %}")) == {"documents"}
    for without in (None, CHATML, "{% for %}"):
        assert template_variables(byte_tokenizer(without)) == frozenset()


def test_what_the_template_reads_and_is_not_passed_is_counted_and_named(tmp_path: Path) -> None:
    rows = [{"messages": GREETED, "enable_thinking": on, "score": 1} for on in (True, False, None)]
    rows.append({"messages": GREETED, "chat_template_kwargs": {"enable_thinking": False, "mode": 1}})
    write_rows(tmp_path / "a.jsonl", rows)
    records = load_records(str(tmp_path / "a.jsonl"))
    assert template_notes(records, byte_tokenizer(THINKS)) == [
        "2 of 4 records have enable_thinking, which is not put into their text; a chat template gets what "
        "chat_template_kwargs has",
        "1 of 4 records have mode, which the chat template does not read",
    ]
    assert template_notes(records[:3], byte_tokenizer(CHATML)) == []
    raw = [record_of(prompt="hi", response="yes"), record_of(text="all")]
    assert template_notes([*records[:3], *raw], byte_tokenizer(CHATML)) == [
        "2 of 5 records are raw text, without the chat template"
    ]
    assert template_notes(raw, byte_tokenizer(None)) == []
    calls = [record_of(messages=AS_SERVED)]
    unset = ["no record sets enable_thinking, which the chat template reads"]
    assert template_notes(calls, byte_tokenizer(THINKS)) == unset
    assert template_notes([*calls, *records], byte_tokenizer(THINKS))[:1] != unset
    assert template_notes(calls, byte_tokenizer(CHATML)) == [
        "1 of 1 records have tool_calls, which the chat template does not read"
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_thinkng": False}, "'enable_thinkng', which the chat template does not read; expected enable_think"),
        ({"add_generation_prompt": False}, "chat_template_kwargs has add_generation_prompt, which is set here"),
        ({"messages": []}, "chat_template_kwargs has messages, which is set here"),
    ],
)
def test_a_variable_without_effect_is_refused(given: dict[str, Any], message: str) -> None:
    tokenizer = byte_tokenizer(THINKS)
    with pytest.raises(DataError, match=f"data.chat_template_kwargs: {message}"):
        require_variables(tokenizer, given, "data.chat_template_kwargs")
    require_variables(tokenizer, {"enable_thinking": False, "tools": TOOLS}, "data.chat_template_kwargs")


def test_a_record_cannot_set_what_is_set_here() -> None:
    record = Record("f#1", "g", Chat(({"role": "user", "content": "hi"},), {"tokenize": True}))
    with pytest.raises(DataError, match="f, record 1: chat_template_kwargs has tokenize, which is set here"):
        build_prompts([record], byte_tokenizer(THINKS))


def test_a_suite_passes_tools_and_variables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = GREETED[:1]
    rows: list[dict[str, Any]] = [{"prompt": messages, "tools": TOOLS}, {"prompt": messages}]
    write_rows(tmp_path / "s.jsonl", [*rows, {"prompt": "raw", "tools": TOOLS}])
    tokenizer = byte_tokenizer(THINKS)
    off: dict[str, Any] = {"enable_thinking": False}
    grid = EvaluationGrid(suite=str(tmp_path / "s.jsonl"), chat_template_kwargs=off)
    with caplog.at_level(logging.WARNING):
        found = {one.id: list(one.prompt_ids) for one in grid_prompts(grid, tokenizer, (None, 400))[None]}
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **off)
    with_tools = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False, **off
    )
    assert found == {"s#1": with_tools, "s#2": asked, "s#3": tokenizer("raw")["input_ids"]}
    assert "1 of 3 records have tools, which is not put into their text" in caplog.text
    with pytest.raises(DataError, match="--chat-template-kwargs: 'thinking', which the chat template does not read"):
        grid_prompts(EvaluationGrid(suite="builtin", chat_template_kwargs={"thinking": 1}), tokenizer, (None,))
