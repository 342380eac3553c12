from __future__ import annotations

from collections import Counter

import pytest

from byte_tokenizer import CHATML_STRIPS_THINKING, byte_tokenizer
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record
from mtp_train.data.tokenize import (
    MAX_CONTINUATION_TOKENS,
    Prompt,
    build_prompts,
    choose_evenly,
    choose_prompts,
    continuation_prompts,
)
from mtp_train.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "<think>hm</think>yes"}


def prompt_text(content: Content, template: str | None = CHATML_STRIPS_THINKING) -> str:
    tokenizer = byte_tokenizer(template)
    (prompt,) = build_prompts([Record("f#1", "g", content)], tokenizer)
    assert (prompt.id, prompt.group) == ("f#1", "g")
    return str(tokenizer.decode(list(prompt.prompt_ids)))


def test_a_chat_ends_where_the_assistant_is_to_speak() -> None:
    assert prompt_text(Chat((USER, ASSISTANT))) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(Chat((USER,))) == prompt_text(Chat((USER, ASSISTANT)))


def test_a_template_that_strips_thinking_serves_for_prompts() -> None:
    assert prompt_text(Chat((USER, ASSISTANT, USER, ASSISTANT))) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_pair_gives_its_raw_prompt() -> None:
    assert prompt_text(PromptResponse("ab", "cd"), None) == "ab"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PlainText("abc"), r"f, record 1: plain text has no prompt; expected chats .*Switch data.regenerate off"),
        (Chat((ASSISTANT,)), "f, record 1: the only assistant turn comes first; expected a message before it"),
        (PromptResponse("", "cd"), "f, record 1: the prompt is empty; expected at least one token"),
    ],
)
def test_records_without_a_prompt_are_refused(content: Content, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompt_text(content)


def test_a_chat_needs_a_chat_template() -> None:
    with pytest.raises(DataError, match="a chat, and the tokenizer has no chat template"):
        prompt_text(Chat((USER,)), None)


def test_a_text_is_continued_from_its_half_but_not_from_afar() -> None:
    texts = ["abcde", "a", "", "x" * 1000]
    records = [Record(f"f#{number}", "g", PlainText(text)) for number, text in enumerate(texts, start=1)]
    tokenizer = byte_tokenizer(None)
    prompts = continuation_prompts(records, tokenizer)
    assert [prompt.id for prompt in prompts] == ["f#1", "f#4"]
    assert tokenizer.decode(list(prompts[0].prompt_ids)) == "ab"
    assert len(prompts[1].prompt_ids) == MAX_CONTINUATION_TOKENS
    with pytest.raises(DataError, match="f, record 1: a chat or a pair; expected plain text to continue"):
        continuation_prompts([Record("f#1", "g", PromptResponse("a", "b"))], tokenizer)


def test_a_choice_of_prompts_grows_without_changing() -> None:
    prompts = [Prompt(f"f#{number}", "g", (1,)) for number in range(50)]
    ten = choose_prompts(prompts, 10, 0)
    assert choose_prompts(prompts[::-1], 20, 0)[:10] == ten
    assert ten != choose_prompts(prompts, 10, 1)
    assert ten != prompts[:10]
    assert len(choose_prompts(prompts, 99, 0)) == 50


def test_prompts_are_chosen_evenly_from_their_groups() -> None:
    sizes = {"a": 50, "b": 3, "c": 1, "d": 20}
    prompts = [Prompt(f"{group}{n}", group, (1,)) for group, size in sizes.items() for n in range(size)]
    counts = Counter(prompt.group for prompt in choose_evenly(prompts, 12, 0))
    assert counts == {"a": 4, "b": 3, "c": 1, "d": 4}
    # At random, the large group has most of them.
    assert Counter(prompt.group for prompt in choose_prompts(prompts, 12, 0))["a"] > 5
    assert len({prompt.group for prompt in choose_evenly(prompts, 4, 0)}) == 4
    for number in range(len(prompts)):
        assert choose_evenly(prompts, number, 0) == choose_evenly(prompts, number + 1, 0)[:number]
    assert choose_evenly(prompts[::-1], 12, 0) == choose_evenly(prompts, 12, 0) != choose_evenly(prompts, 12, 1)
