from __future__ import annotations

from collections import Counter

import pytest
from transformers import PreTrainedTokenizerFast

from byte_tokenizer import (
    CHATML,
    CHATML_MARKED,
    CHATML_NEVER_THINKS_ALOUD,
    CHATML_REFUSES,
    CHATML_STRIPS_THINKING,
    CLOSES,
    OPENS,
    adding_tokenizer,
    byte_tokenizer,
)
from mtp_inference.opening import prompt_tokens
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record
from mtp_train.data.tokenize import (
    MAX_CONTINUATION_TOKENS,
    Document,
    Prompt,
    build_prompts,
    choose_evenly,
    choose_prompts,
    frequent_tokens,
    tokenize_records,
)
from mtp_train.errors import DataError
from mtp_train.runs.training import keep_targets


def chat(*turns: str) -> Chat:
    roles = ("user", "assistant")
    return Chat(tuple({"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)))


def records(*contents: Content) -> list[Record]:
    return [Record(f"f#{number}", f"g{number}", content) for number, content in enumerate(contents, start=1)]


def text(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(document.input_ids))


def one(content: Content, tokenizer: PreTrainedTokenizerFast) -> Document:
    (document,), _ = tokenize_records(records(content), tokenizer, 512)
    return document


def targets(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(document.input_ids[document.loss_mask]))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_only_what_the_assistant_says_is_a_target(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    document = one(chat("hi", "hello", "more", "good bye"), tokenizer)
    assert targets(document, tokenizer) == "hello<|im_end|>good bye<|im_end|>"
    assert text(document, tokenizer).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello")


def test_turns_whose_thinking_is_dropped_later_are_learnt_where_they_were_said() -> None:
    tokenizer = byte_tokenizer(CHATML_STRIPS_THINKING)
    content = chat("hi", "<think>hm</think>yes", "more", "<think>so</think>no", "bye")
    documents, _ = tokenize_records(records(content), tokenizer, 512)
    assert [(document.id, targets(document, tokenizer)) for document in documents] == [
        ("f#1/0", "<think>hm</think>yes<|im_end|>"),
        ("f#1/1", "<think>so</think>no<|im_end|>"),
    ]
    # The history as a server writes it when the second turn is asked for.
    asked = tokenizer.apply_chat_template(list(content.messages[:3]), tokenize=False, add_generation_prompt=True)
    assert text(documents[1], tokenizer).startswith(asked + "<think>so</think>no")
    assert "hm" not in asked
    assert {document.group for document in documents} == {"g1"}


def test_turns_that_stay_as_they_were_share_a_document() -> None:
    tokenizer = byte_tokenizer(CHATML_STRIPS_THINKING)
    content = chat("hi", "yes", "more", "<think>so</think>no", "and", "fine")
    documents, _ = tokenize_records(records(content), tokenizer, 512)
    learnt = [targets(document, tokenizer) for document in documents]
    assert learnt == ["<think>so</think>no<|im_end|>", "yes<|im_end|>fine<|im_end|>"]


def test_thinking_that_a_template_always_drops_is_put_back_where_it_is_said() -> None:
    tokenizer = byte_tokenizer(CHATML_NEVER_THINKS_ALOUD)
    content = chat("hi", "<think>\nhm\n</think>\n\nyes", "more", "so\n</think>\n\nno")
    documents, _ = tokenize_records(records(content), tokenizer, 512)
    for document, said, end in zip(documents, ("hm", "so"), ("yes", "no"), strict=True):
        whole = text(document, tokenizer)
        assert whole.endswith(f"<|im_start|>assistant\n<think>\n{said}\n</think>\n\n{end}<|im_end|>")
        assert targets(document, tokenizer) == f"{said}\n</think>\n\n{end}<|im_end|>"
        assert whole.count("<think>") == 1
    apart = Chat(
        ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "reasoning_content": "hm"})
    )
    assert targets(one(apart, tokenizer), tokenizer) == "hm\n</think>\n\nyes<|im_end|>"
    # A turn without thinking stays as the template writes it.
    assert targets(one(chat("hi", "yes"), tokenizer), tokenizer) == "yes<|im_end|>"


@pytest.mark.parametrize(
    ("opening", "written", "said"),
    [
        # As DeepSeek V3.1 writes it: the prompt asks for an answer without thinking.
        ("</think>", "</think>{{ message.content.split('</think>')[-1] }}", "yes"),
        # Qwen3, served without thinking: the template writes thinking where there is some, and the prompt closes it.
        (
            "<think>\n\n</think>\n\n",
            "{% if '</think>' in message.content or message.reasoning_content %}{{ message.content }}{% else %}"
            "<think>\n\n</think>\n\n{{ message.content }}{% endif %}",
            "yes",
        ),
        # Kimi K2 Thinking: the template writes empty thinking for every finished turn.
        ("", "<think></think>{{ message.content.split('</think>')[-1] }}", "<think>hm</think>yes"),
        # Nemotron Nano 2: the prompt opens the thinking, and so may the turn after it.
        ("<think>", "<think>{{ message.content }}", "hm</think>yes"),
    ],
)
def test_thinking_is_learnt_as_the_prompt_asks_for_it(opening: str, written: str, said: str) -> None:
    prompt = "<|im_start|>assistant\n"
    tokenizer = byte_tokenizer(
        "{% for message in messages %}{% if message.role == 'user' %}<|im_start|>user\n{{ message.content }}"
        f"{{% else %}}{prompt}{written}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{opening}{{% endif %}}"
    )
    document = one(chat("hi", "<think>hm</think>yes"), tokenizer)
    assert targets(document, tokenizer) == f"{said}<|im_end|>"
    assert text(document, tokenizer).rstrip("\n").endswith(f"{prompt}{opening}{said}<|im_end|>")


def test_a_turn_that_does_not_follow_its_prompt_is_refused() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<|im_start|>assistant\n", "<|im_start|>bot\n"))
    with pytest.raises(
        DataError, match=r"f, record 1, message 2: .*after the prompt for it; .*Add 'data.regenerate={}'"
    ):
        one(chat("hi", "yes"), tokenizer)


def test_a_token_that_straddles_the_end_of_the_prompt_is_no_target() -> None:
    tokenizer = byte_tokenizer()
    document = one(chat("hi", "\nhello"), tokenizer)
    assert "assistant\n\nhello" in text(document, tokenizer)
    assert targets(document, tokenizer) == "hello<|im_end|>"


def test_a_response_and_its_end_are_targets_and_the_prompt_is_not() -> None:
    tokenizer = byte_tokenizer()
    document = one(PromptResponse("ab", "cd"), tokenizer)
    assert text(document, tokenizer) == "abcd<|im_end|>"
    assert document.loss_mask.tolist() == [False, False, True, True, True]
    assert (document.id, document.group) == ("f#1", "g1")


def test_all_of_a_plain_text_is_a_target() -> None:
    tokenizer = byte_tokenizer()
    document = one(PlainText("abc"), tokenizer)
    assert text(document, tokenizer) == "abc<|im_end|>"
    assert all(document.loss_mask)


def test_an_end_of_text_that_the_data_writes_out_is_kept_and_not_doubled() -> None:
    tokenizer = byte_tokenizer()
    assert text(one(PlainText("abc<|im_end|>"), tokenizer), tokenizer) == "abc<|im_end|>"
    pair = PromptResponse("a<|im_end|>", "b<|im_end|>")
    assert text(one(pair, tokenizer), tokenizer) == "a<|im_end|>b<|im_end|>"


def test_long_texts_are_split_and_long_responses_truncated() -> None:
    tokenizer = byte_tokenizer()
    contents: list[Content] = [PlainText("abcdefgh"), PromptResponse("ab", "cdefgh"), PlainText("xyz")]
    documents, notes = tokenize_records(records(*contents), tokenizer, 5)
    assert [(document.id, text(document, tokenizer)) for document in documents] == [
        ("f#1/0", "abcde"),
        ("f#1/1", "fgh<|im_end|>"),
        ("f#2", "abcde"),
        ("f#3", "xyz<|im_end|>"),
    ]
    assert documents[0].group == documents[1].group == "g1"
    assert notes == ["1 of 3 records are cut after 5 tokens"]


def test_pieces_and_records_without_a_target_are_left_out() -> None:
    tokenizer = byte_tokenizer()
    contents: list[Content] = [PlainText("abcd"), PromptResponse("abcdef", "g"), PlainText("a")]
    documents, notes = tokenize_records(records(*contents), tokenizer, 4)
    assert [document.id for document in documents] == ["f#1/0"]
    assert notes == [
        "1 of 3 records are cut after 4 tokens",
        "2 of 3 records are left out, as nothing is left to learn from the third token on",
    ]


@pytest.mark.parametrize("bare", [chat("hi"), PromptResponse("ab")])
def test_prompts_without_a_response_are_refused_where_responses_are_learnt(bare: Content) -> None:
    with pytest.raises(
        DataError, match=r"f, record 2: a prompt without a response, as are 2 of 3 records; .*data.regenerate=\{\}"
    ):
        tokenize_records(records(PlainText("abcd"), bare, bare), byte_tokenizer(), 64)
    assert len(build_prompts(records(bare, bare), byte_tokenizer())) == 2


def test_nothing_left_is_refused_with_counts() -> None:
    contents: list[Content] = [PromptResponse("abcdef", "g"), PlainText("a")]
    with pytest.raises(
        DataError,
        match=r"no token left after masking \(1 of 2 records are cut .*; 2 of 2 .*\); expected.*data.seq_len",
    ):
        tokenize_records(records(*contents), byte_tokenizer(), 4)


def test_a_chat_needs_a_chat_template() -> None:
    with pytest.raises(
        DataError, match=r"f, record 1, message 2: a chat, and the tokenizer has no chat template; .*Add chat"
    ):
        one(chat("hi", "hello"), byte_tokenizer(None))


def test_what_a_template_refuses_is_named() -> None:
    with pytest.raises(
        DataError,
        match=r"f, record 1, message 2: the chat template fails on it \(TemplateError: roles must",
    ):
        one(chat("hi", "hello"), byte_tokenizer(CHATML_REFUSES))


def test_a_tokenizer_without_offsets_is_refused_for_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(DataError, match="does not give the place of its tokens in the text; expected one that does"):
        one(chat("hi", "hello"), byte_tokenizer())


def test_raw_text_needs_an_end_of_text_token() -> None:
    with pytest.raises(DataError, match="tokenizer: no end-of-text token; expected one to close documents"):
        one(PlainText("abc"), byte_tokenizer(eos=None))


def test_a_tokenizer_that_closes_by_itself_closes_once() -> None:
    tokenizer = adding_tokenizer(CLOSES)
    assert text(one(PlainText("abc"), tokenizer), tokenizer) == "abc<|im_end|>"
    assert text(one(PromptResponse("ab", "c"), tokenizer), tokenizer) == "abc<|im_end|>"


@pytest.mark.parametrize(
    ("content", "whole", "prompt"),
    [
        (PlainText("abcd"), "<|im_start|>abcd<|im_end|>", "<|im_start|>a"),
        (PromptResponse("ab", "cd"), "<|im_start|>abcd<|im_end|>", "<|im_start|>ab"),
        # A chat's template writes the token itself, where the model was trained with it.
        (
            chat("a", "bc"),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n",
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_begin_token_opens_a_document_and_never_a_response(content: Content, whole: str, prompt: str) -> None:
    tokenizer = adding_tokenizer(OPENS)
    assert text(one(content, tokenizer), tokenizer) == whole
    (asked,) = build_prompts(records(content), tokenizer)
    assert tokenizer.decode(list(asked.prompt_ids)) == prompt
    assert tokenizer.decode(prompt_tokens(tokenizer, "ab", chat=False, where="--prompt")) == "<|im_start|>ab"


USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "<think>hm</think>yes"}


def prompt_text(content: Content) -> str:
    tokenizer = byte_tokenizer(CHATML_STRIPS_THINKING)
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Chat((ASSISTANT,)), "f, record 1: begins with its only assistant turn; expected a prompt"),
        (PromptResponse("", "cd"), "f, record 1: the prompt is empty; expected at least one token"),
    ],
)
def test_records_without_a_prompt_are_refused(content: Content, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompt_text(content)


def test_a_text_is_continued_from_its_half_but_not_from_afar() -> None:
    texts = ["abcde", "a", "", "x" * 1000]
    records = [Record(f"f#{number}", "g", PlainText(text)) for number, text in enumerate(texts, start=1)]
    tokenizer = byte_tokenizer(None)
    prompts = build_prompts(records, tokenizer)
    assert [prompt.id for prompt in prompts] == ["f#1", "f#4"]
    assert tokenizer.decode(list(prompts[0].prompt_ids)) == "ab"
    assert len(prompts[1].prompt_ids) == MAX_CONTINUATION_TOKENS


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


def document(*tokens: int, targets: str) -> Document:
    return Document(tokens, tuple(mark == "x" for mark in targets), "g", "d")


def test_the_most_frequent_targets_are_taken_and_places_left_go_to_the_lower_ids() -> None:
    text = [document(7, 7, 7, 3, 3, 5, targets="...xxx"), document(5, 5, 9, targets="x.x")]
    # Targets: 3 twice, 5 twice, 9 once; 7 never.
    assert frequent_tokens(text, 2, 12, always=()) == [3, 5]
    assert frequent_tokens(text, 5, 12, always=()) == [0, 1, 3, 5, 9]
    # Tokens that end a text are always in.
    assert frequent_tokens(text, 2, 12, always={11}) == [3, 11]


def test_only_kept_tokens_stay_targets_and_what_has_none_left_goes() -> None:
    text = [
        document(1, 2, 3, 4, 3, targets="..xxx"),
        document(1, 2, 4, 4, targets="..xx"),
        document(3, 3, 4, targets="xx."),
    ]
    (kept,) = keep_targets(text, {2, 3})
    assert (tuple(kept.input_ids), tuple(kept.loss_mask)) == ((1, 2, 3, 4, 3), (False, False, True, False, True))
    assert len(keep_targets(text, {3, 4})) == 2
