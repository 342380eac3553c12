from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from byte_tokenizer import CHATML, CHATML_MARKED, CHATML_REFUSES, CHATML_STRIPS_THINKING, byte_tokenizer
from mtp_train.data.records import Chat, Content, PlainText, PromptResponse, Record
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.errors import DataError


def chat(*turns: str) -> Chat:
    roles = ("user", "assistant")
    return Chat(tuple({"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)))


def records(*contents: Content) -> list[Record]:
    return [Record(f"f#{number}", f"g{number}", content) for number, content in enumerate(contents, start=1)]


def text(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(tokenizer.decode(list(document.input_ids)))


def one(content: Content, tokenizer: PreTrainedTokenizerFast, seq_len_tokens: int = 512) -> Document:
    documents, _ = tokenize_records(records(content), tokenizer, seq_len_tokens)
    assert len(documents) == 1
    return documents[0]


def targets(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    return str(
        tokenizer.decode([t for t, wanted in zip(document.input_ids, document.loss_mask, strict=True) if wanted])
    )


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_only_what_the_assistant_says_is_a_target(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    document = one(chat("hi", "hello", "more", "good bye"), tokenizer)
    assert targets(document, tokenizer) == "hello<|im_end|>good bye<|im_end|>"
    assert text(document, tokenizer).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello")


def test_thinking_is_a_target() -> None:
    tokenizer = byte_tokenizer()
    assert targets(one(chat("hi", "<think>hm</think>yes"), tokenizer), tokenizer) == "<think>hm</think>yes<|im_end|>"


def test_a_template_that_strips_earlier_thinking_is_refused_where_it_does() -> None:
    tokenizer = byte_tokenizer(CHATML_STRIPS_THINKING)
    single = one(chat("hi", "<think>hm</think>yes"), tokenizer)
    assert targets(single, tokenizer) == "<think>hm</think>yes<|im_end|>"
    with pytest.raises(DataError, match=r"f, record 1, message 2: .*strip thinking.*Use data.regenerate"):
        one(chat("hi", "<think>hm</think>yes", "more", "no"), tokenizer)


def test_a_token_that_straddles_the_end_of_the_prompt_is_no_target() -> None:
    tokenizer = byte_tokenizer()
    document = one(chat("hi", "\nhello"), tokenizer)
    assert "assistant\n\nhello" in text(document, tokenizer)
    assert targets(document, tokenizer) == "hello<|im_end|>"


def test_a_response_and_its_end_are_targets_and_the_prompt_is_not() -> None:
    tokenizer = byte_tokenizer()
    document = one(PromptResponse("ab", "cd"), tokenizer)
    assert text(document, tokenizer) == "abcd<|im_end|>"
    assert document.loss_mask == (False, False, True, True, True)
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
    documents, counts = tokenize_records(records(*contents), tokenizer, 5)
    assert [(document.id, text(document, tokenizer)) for document in documents] == [
        ("f#1/0", "abcde"),
        ("f#1/1", "fgh<|im_end|>"),
        ("f#2", "abcde"),
        ("f#3", "xyz<|im_end|>"),
    ]
    assert documents[0].group == documents[1].group == "g1"
    assert (counts.split, counts.truncated, counts.dropped) == (1, 1, 0)
    assert (counts.records, counts.documents, counts.tokens) == (3, 4, 5 + 4 + 5 + 4)
    assert counts.target_tokens == 3 + 2 + 3 + 2


def test_pieces_and_records_without_a_target_are_left_out() -> None:
    tokenizer = byte_tokenizer()
    contents: list[Content] = [PlainText("abcd"), PromptResponse("abcdef", "g"), PlainText("a"), chat("hi")]
    documents, counts = tokenize_records(records(*contents), tokenizer, 4)
    assert [document.id for document in documents] == ["f#1/0"]
    assert counts.dropped == 3


def test_nothing_left_is_refused_with_counts() -> None:
    contents: list[Content] = [PromptResponse("abcdef", "g"), PlainText("a")]
    with pytest.raises(
        DataError,
        match=r"no token left after masking \(2 records, 1 truncated at 4 tokens, 2 dropped\); expected.*data.seq_len",
    ):
        tokenize_records(records(*contents), byte_tokenizer(), 4)


def test_a_chat_needs_a_chat_template() -> None:
    with pytest.raises(DataError, match=r"f, record 1: a chat, and the tokenizer has no chat template; .*Add chat"):
        one(chat("hi", "hello"), byte_tokenizer(None))


@pytest.mark.parametrize("template", [CHATML_REFUSES, CHATML_REFUSES + "{% generation %}{% endgeneration %}"])
def test_what_a_template_refuses_is_named(template: str) -> None:
    with pytest.raises(DataError, match=r"f, record 1: the chat template refuses it \(roles must alternate\);"):
        one(chat("hi", "hello"), byte_tokenizer(template))


def test_a_tokenizer_without_offsets_is_refused_for_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(DataError, match="does not give the place of its tokens in the text; expected one that does"):
        one(chat("hi", "hello"), byte_tokenizer())


def test_raw_text_needs_an_end_of_text_token() -> None:
    with pytest.raises(DataError, match="tokenizer: no end-of-text token; expected one to close documents"):
        one(PlainText("abc"), byte_tokenizer(eos=None))


def test_a_tokenizer_that_closes_by_itself_closes_once() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    eos_id = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", eos_id)]
    )
    assert text(one(PlainText("abc"), tokenizer), tokenizer) == "abc<|im_end|>"
    assert text(one(PromptResponse("ab", "c"), tokenizer), tokenizer) == "abc<|im_end|>"
