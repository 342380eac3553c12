"""Chat templates are programs from anywhere: whatever one raises is one message."""

from __future__ import annotations

import pytest

from byte_tokenizer import byte_tokenizer
from mtp_train.checkpoints.tokenizer import render_chat
from mtp_train.errors import DataError

MESSAGES = [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "1"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for %}", "TemplateSyntaxError: Expected an expression"),
        ("{{ 'a' | nope }}", "TemplateAssertionError: No filter named 'nope'."),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 1 + 'a' }}", "TypeError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% include 'x' %}", "TypeError: no loader"),
    ],
)
def test_whatever_a_template_raises_is_one_message(template: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        render_chat(byte_tokenizer(template), MESSAGES, "chats.jsonl, line 3", add_generation_prompt=False)
    assert str(caught.value).startswith(f"chats.jsonl, line 3: the chat template fails on it ({message}")
    assert "; expected" in str(caught.value)


def test_a_template_that_is_no_text_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = 3
    with pytest.raises(DataError, match="the tokenizer's chat template is int; expected text"):
        render_chat(tokenizer, MESSAGES, "chats.jsonl", add_generation_prompt=False)
