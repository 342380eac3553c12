from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from byte_tokenizer import OPENS, adding_tokenizer, byte_tokenizer
from json_files import user
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record, content_group
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError
from mtp_train.evaluation.suites import (
    DEMO_HOLDOUT,
    DEMO_SEED,
    choose_records,
    load_suite,
    suite_prompts,
)
from mtp_train.recipe.loading import load_recipe
from repository import REPOSITORY

pytestmark = pytest.mark.usefixtures("own_datasets_cache")
TASKS = ["coding", "math", "reasoning", "json_tools", "multilingual", "qa", "rag", "summarisation", "stem"]
TASKS += ["roleplay", "writing"]
CHATML_WITHOUT_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORES_THE_CHAT = "{% for message in messages %}<|im_start|>{{ message.role }}<|im_end|>{% endfor %}"


def suite_of(*contents: Content, task: str = "t") -> list[Record]:
    name = "s" if task == "t" else task
    return [
        Record(f"{name}#{number}", content_group(content), content, task=task)
        for number, content in enumerate(contents, 1)
    ]


def text(prompt: Prompt, template: str | None = None) -> str:
    return str(byte_tokenizer(template).decode(list(prompt.prompt_ids)))


LETTERS = suite_of(*(Chat((user(letter * 30),)) for letter in "abcdef"))


# The built-in suite.


def test_every_builtin_prompt_can_be_written_with_and_without_a_template() -> None:
    suite = load_suite("builtin")
    for template in (byte_tokenizer().chat_template, CHATML_WITHOUT_SYSTEM, None):
        assert len(suite_prompts(suite, byte_tokenizer(template))) == len(suite)


# The demo's.


def test_the_demo_suite_is_what_the_demo_recipes_do_not_train_on() -> None:
    for path in ("recipes/retrain_head.yaml", "recipes/fastmtp.yaml"):
        recipe = load_recipe(REPOSITORY / path)
        assert (recipe.data.holdout, recipe.seed) == (DEMO_HOLDOUT, DEMO_SEED)
        assert [source.path for source in recipe.data.sources] == ["demo:prompts"]
    suite = load_suite("demo")
    counts = Counter(one.task for one in suite)
    assert list(counts) == ["functions", "code"]
    assert 50 < counts["functions"] < 500
    assert counts["code"] > 50
    prompts = suite_prompts(suite, byte_tokenizer(), prompts_per_task=2, tasks=["code"])
    assert len(prompts) == 2
    assert {prompt.task for prompt in prompts} == {"code"}


# The choice.


def test_a_larger_choice_keeps_the_smaller_one_of_every_task() -> None:
    suite = load_suite("builtin")
    two, five = ([one.id for one in choose_records(suite, prompts_per_task=number, seed=3)] for number in (2, 5))
    assert len(two) == 2 * len(TASKS)
    assert [id for start in range(0, len(five), 5) for id in five[start : start + 2]] == two
    assert two != [one.id for one in choose_records(suite, prompts_per_task=2, seed=4)]
    assert len(choose_records(suite)) == len(suite)


def test_tasks_are_chosen_by_name() -> None:
    suite = load_suite("builtin")
    assert {one.task for one in choose_records(suite, tasks=["rag", "qa"])} == {"rag", "qa"}
    with pytest.raises(DataError, match=r"no task 'codin'; expected some of coding, math"):
        choose_records(suite, tasks=["qa", "codin"])


# Templates.


def test_without_a_template_the_messages_follow_one_another() -> None:
    suite = suite_of(Chat((user("one"), {"role": "assistant", "content": "two"}, user("three"))))
    (prompt,) = suite_prompts(suite, byte_tokenizer(None))
    assert text(prompt) == "one\n\ntwo\n\nthree"
    assert (prompt.id, prompt.task) == ("s#1", "t")


def test_a_template_without_a_system_role_gets_it_from_the_user() -> None:
    suite = suite_of(Chat(({"role": "system", "content": "Be kind."}, user("Hi."))))
    (prompt,) = suite_prompts(suite, byte_tokenizer(CHATML_WITHOUT_SYSTEM))
    assert text(prompt) == "<|im_start|>user\nBe kind.\n\nHi.<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match="s, record 1: the chat template fails on it"):
        suite_prompts(
            suite_of(Chat((user("a"), {"role": "system", "content": "b"}))), byte_tokenizer(CHATML_WITHOUT_SYSTEM)
        )


# Contexts.


def inserted(short: tuple[int, ...], long: tuple[int, ...]) -> tuple[int, ...]:
    """Return the one block by which ``long`` is longer; fails where there is none such."""
    extra = len(long) - len(short)
    for place in range(len(short) + 1):
        if long[:place] + long[place + extra :] == short:
            return long[place : place + extra]
    raise AssertionError("more than one block differs")


@pytest.mark.parametrize("template", [byte_tokenizer().chat_template, CHATML_WITHOUT_SYSTEM, None])
def test_a_context_adds_one_block_and_changes_no_token(template: str | None) -> None:
    suite = load_suite("builtin")
    tokenizer = byte_tokenizer(template)
    own = {prompt.id: prompt for prompt in suite_prompts(suite, tokenizer, prompts_per_task=3)}
    longest = max(len(prompt.prompt_ids) for prompt in own.values()) + 1
    shorter = suite_prompts(suite, tokenizer, prompts_per_task=3, context_tokens=longest)
    longer = suite_prompts(suite, tokenizer, prompts_per_task=3, context_tokens=4 * longest + 1)
    assert [prompt.id for prompt in shorter] == [prompt.id for prompt in longer] == list(own)
    for short, long in zip(shorter, longer, strict=True):
        assert (len(short.prompt_ids), len(long.prompt_ids)) == (longest, 4 * longest + 1)
        assert inserted(own[short.id].prompt_ids, short.prompt_ids)
        assert inserted(short.prompt_ids, long.prompt_ids)


def test_the_block_stands_before_the_last_user_message() -> None:
    chat = Chat((user("first"), {"role": "assistant", "content": "second"}, user("0 third")))
    suite = suite_of(chat, PlainText("filler"))
    prompt, other = suite_prompts(suite, byte_tokenizer(), context_tokens=130)
    if prompt.id != "s#1":
        prompt, other = other, prompt
    head, _, rest = text(prompt).partition("second<|im_end|>\n<|im_start|>user\n")
    assert head == "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n"
    assert re.fullmatch(r"[a-z\n]*filler\n\n0 third<\|im_end\|>\n<\|im_start\|>assistant\n", rest)
    assert text(other).endswith("0 third\n\nfil")


@pytest.mark.parametrize(
    ("make", "written", "context"),
    [(byte_tokenizer, "<|im_start|>ab", ""), (partial(adding_tokenizer, OPENS), "ab", "{}\n\n")],
)
def test_begin_of_text_stays_first_and_alone(make: Callable[[str], Any], written: str, context: str) -> None:
    """The prompt has it, or the tokenizer adds it to raw text: not to the texts that are inserted."""
    tokenizer = make("{{ bos_token }}{{ messages[0].content }}")
    tokenizer.bos_token = "<|im_start|>"
    suite = suite_of(PromptResponse(written, ""), Chat((user("cd"),)))
    prompts = suite_prompts(suite, tokenizer, context_tokens=8 if context else 6)
    # Of eight tokens, two are of an inserted text that is cut.
    assert {prompt.id: text(prompt) for prompt in prompts} == {
        "s#1": f"<|im_start|>{context.format('d')}cd\n\nab",
        "s#2": f"<|im_start|>{context.format('b')}ab\n\ncd",
    }


def test_filler_is_never_the_prompts_own_and_repeats_only_when_all_was_used() -> None:
    tokenizer = byte_tokenizer(None)
    length = 30 + 5 * 31
    for prompt in suite_prompts(LETTERS, tokenizer, context_tokens=length):
        own = text(prompt)[-1]
        pieces = text(prompt).split("\n\n")
        assert pieces[-1] == own * 30
        assert sorted(piece[0] for piece in pieces[:-1]) == [letter for letter in "abcdef" if letter != own]
    for prompt in suite_prompts(LETTERS, tokenizer, context_tokens=2 * length - 30):
        counts = Counter(piece[0] for piece in text(prompt).split("\n\n"))
        assert counts.pop(text(prompt)[-1]) == 1
        assert set(counts.values()) == {2}


def test_filler_of_the_same_task_stands_nearest() -> None:
    others = suite_of(*(PlainText(letter * 5) for letter in "xyz"), task="u")
    suite = [*others, *LETTERS]
    # All of it: a question, five others of its task and three of another, with the tokens that part them.
    length = 30 + 5 * 31 + 3 * 6
    for prompt in suite_prompts(suite, byte_tokenizer(None), context_tokens=length, tasks=["t"]):
        assert [piece[0] in "xyz" for piece in text(prompt).split("\n\n")] == [True] * 3 + [False] * 6


def test_records_of_a_group_do_not_stand_before_each_other() -> None:
    suite = [Record(f"s#{number}", group, PlainText(group * 9), task="t") for number, group in enumerate("aaabb")]
    for prompt in suite_prompts(suite, byte_tokenizer(None), context_tokens=60):
        assert set(text(prompt)[:-4]) - {"\n"} == {"b" if prompt.group == "a" else "a"}


def test_the_filler_depends_on_the_prompt_and_the_seed_and_nothing_else() -> None:
    tokenizer = byte_tokenizer()
    all_of_them = {p.id: p for p in suite_prompts(LETTERS, tokenizer, context_tokens=150, seed=1)}
    assert [
        all_of_them[p.id] for p in suite_prompts(LETTERS, tokenizer, context_tokens=150, seed=1, prompts_per_task=3)
    ] == (suite_prompts(LETTERS[::-1], tokenizer, context_tokens=150, seed=1, prompts_per_task=3))
    assert all_of_them != {p.id: p for p in suite_prompts(LETTERS, tokenizer, context_tokens=150, seed=2)}
    assert len({text(prompt)[17:40] for prompt in all_of_them.values()}) > 1


def test_a_prompt_that_is_longer_is_left_out_and_the_rest_keep_their_place() -> None:
    suite = suite_of(
        *(PromptResponse(letter * length, "") for letter, length in zip("abcd", (10, 50, 51, 20), strict=True))
    )
    prompts = suite_prompts(suite, byte_tokenizer(None), context_tokens=50)
    assert {prompt.id for prompt in prompts} == {"s#1", "s#2", "s#4"}
    assert len(choose_records(suite)) - len(prompts) == 1
    assert {len(prompt.prompt_ids) for prompt in prompts} == {50}
    with pytest.raises(DataError, match="--suite: none of 4 prompts is of 9 tokens or fewer; expected at least one"):
        suite_prompts(suite, byte_tokenizer(None), context_tokens=9)


def test_a_text_without_a_half_is_left_out() -> None:
    prompts = suite_prompts(suite_of(PlainText("a"), PlainText("abcd")), byte_tokenizer(None))
    assert [text(prompt) for prompt in prompts] == ["ab"]
    with pytest.raises(DataError, match="none of 1 prompts is of two tokens or more"):
        suite_prompts(suite_of(PlainText("a")), byte_tokenizer(None))


def test_a_suite_without_other_text_cannot_be_made_longer() -> None:
    suite = suite_of(Chat((user("same"),)), Chat((user("same"),)))
    assert len(suite_prompts(suite, byte_tokenizer())) == 2
    with pytest.raises(DataError, match="s, record 1: the suite has no other text to put before it"):
        suite_prompts(suite, byte_tokenizer(), context_tokens=400)


def test_a_template_that_leaves_the_message_out_is_refused() -> None:
    with pytest.raises(DataError, match="the chat template does not render the last user message"):
        suite_prompts(LETTERS, byte_tokenizer(IGNORES_THE_CHAT), context_tokens=400)
