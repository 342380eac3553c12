"""Streamed text against the text decoded at once, for three ways in which tokenizers put characters together."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from byte_tokenizer import byte_tokenizer
from calls import calls_of
from mtp_inference.text import TextStream
from mtp_train.checkpoints.demo import demo_path

LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
METASPACE_DECODER = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
WORDS = ("▁", "▁he", "llo", "▁wor", "ld", "h", "e", "l", "o", "w", "r", "d", ",", "é", "▁▁", "\ufffd", "x\ufffd")


def metaspace_tokenizer(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few pieces, a token for each byte they do not cover, and two special tokens."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    merges = [("▁", "▁")]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte": byte_tokenizer,
    "demo": lambda: AutoTokenizer.from_pretrained(demo_path("base")),
    "metaspace": lambda: metaspace_tokenizer(METASPACE_DECODER),
    "llama": lambda: metaspace_tokenizer(LLAMA_DECODER),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def llama() -> PreTrainedTokenizerFast:
    return TOKENIZERS["llama"]()


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def pushed(stream: TextStream, tokens: Iterable[int]) -> list[str]:
    return [stream.push(token) for token in tokens]


def ids(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(pieces))


def of_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def random_tokens(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int) -> list[int]:
    """Draw tokens in stretches from the whole vocabulary, one id beyond it, and stretches of real text.

    Tokens of single bytes come from text alone: an invalid byte spoils the characters before it in the text decoded at
    once, and not in a stream.
    """
    drawn = [one for one in range(len(tokenizer) + 1) if not is_byte(tokenizer, one)]
    tokens: list[int] = []
    while len(tokens) < size:
        if rng.random() < 0.3:
            tokens += of_text(tokenizer, rng.choice(["hello wörld", "🙂🙂 ", "日本語 he", "a\n\nb", "x\ufffd"]))
        else:
            tokens += rng.choices(drawn, k=rng.randrange(1, 12))
    return tokens


def is_byte(tokenizer: PreTrainedTokenizerFast, token: int) -> bool:
    return str(tokenizer.convert_ids_to_tokens(token)).startswith("<0x")


def test_pieces_add_up_to_the_whole_text_for_random_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(1)
    for _ in range(150):
        tokens = random_tokens(tokenizer, rng, rng.randrange(1, 60))
        stream = TextStream(tokenizer, ())
        assert "".join(pushed(stream, tokens)) + stream.finish() == decoded(tokenizer, tokens)
        assert stream.text == decoded(tokenizer, tokens)


def test_decoding_token_by_token_is_not_enough(tokenizer: PreTrainedTokenizerFast) -> None:
    """Negative control: the promise above is not kept by doing nothing."""
    tokens = of_text(tokenizer, "hello wörld 🙂 hello")
    assert "".join(decoded(tokenizer, [token]) for token in tokens) != decoded(tokenizer, tokens)


def test_text_goes_on_where_the_prompt_ended(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(2)
    for _ in range(100):
        prompt = [*of_text(tokenizer, "hello 日本 wörld" * rng.randrange(3)), *of_text(tokenizer, "he")]
        prompt += [tokenizer.eos_token_id] * rng.choice([0, 1, 5])
        tokens = random_tokens(tokenizer, rng, 20)
        stream = TextStream(tokenizer, prompt)
        text = "".join(pushed(stream, tokens)) + stream.finish()
        assert decoded(tokenizer, prompt) + text == decoded(tokenizer, [*prompt, *tokens])


def test_a_word_after_a_prompt_keeps_its_space(llama: PreTrainedTokenizerFast) -> None:
    word = ids(llama, "▁wor", "ld")
    assert decoded(llama, word) == "world"
    assert pushed(TextStream(llama, ids(llama, "▁he", "llo")), word) == [" wor", "ld"]
    assert pushed(TextStream(llama, ids(llama, "<s>")), word) == ["wor", "ld"]


@pytest.mark.parametrize("end", ["\ufffd", "\ufffd\ufffd \ufffd"])
def test_a_replacement_character_of_the_prompt_is_not_repeated(tokenizer: PreTrainedTokenizerFast, end: str) -> None:
    prompt = of_text(tokenizer, "he" + end)
    assert TextStream(tokenizer, prompt).finish() == ""
    stream = TextStream(tokenizer, prompt)
    assert pushed(stream, [tokenizer.eos_token_id]) == [""]
    assert stream.finish() == ""
    stream = TextStream(tokenizer, prompt)
    assert "".join(pushed(stream, of_text(tokenizer, "he"))).strip() == "he"


def test_an_incomplete_character_waits_for_its_last_byte(llama: PreTrainedTokenizerFast) -> None:
    euro = ids(llama, "<0xE2>", "<0x82>", "<0xAC>")
    stream = TextStream(llama, ())
    assert pushed(stream, [*euro, *euro[:2]]) == ["", "", "€", "", ""]
    assert stream.finish() == "\ufffd" * 4
    stream = TextStream(llama, ())
    assert pushed(stream, [*euro, *ids(llama, "<0xFF>", "</s>", "h")]) == ["", "", "€", "", "", "\ufffd" * 3 + "h"]


def test_special_tokens_and_ids_without_a_token_are_silent(tokenizer: PreTrainedTokenizerFast) -> None:
    silent = [tokenizer.eos_token_id, len(tokenizer), len(tokenizer) + 100] * 20
    tokens = of_text(tokenizer, "hello wörld")
    mixed = [*silent, *(part for token in tokens for part in (token, *silent))]
    stream = TextStream(tokenizer, ())
    assert "".join(pushed(stream, mixed)) + stream.finish() == decoded(tokenizer, tokens)


def test_the_work_per_token_does_not_grow_with_the_text(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = calls_of(monkeypatch, tokenizer, "decode")
    pushed(TextStream(tokenizer, of_text(tokenizer, "hello wörld " * 200)), of_text(tokenizer, "hello wörld 🙂 " * 60))
    assert max(len(tokens) for (tokens,) in decoded) <= 20
