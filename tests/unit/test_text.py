"""Streamed text against the text decoded at once, for three ways in which tokenizers put characters together."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from byte_tokenizer import byte_tokenizer
from mtp_inference.text import TextStream
from mtp_train.checkpoints.demo import demo_path
from mtp_train.errors import MtpError

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
def byte_level() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


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
    """Draw tokens in stretches from the whole vocabulary, one id beyond it, and stretches of real text."""
    tokens: list[int] = []
    while len(tokens) < size:
        if rng.random() < 0.3:
            tokens += of_text(tokenizer, rng.choice(["hello wörld", "🙂🙂 ", "日本語 he", "a\n\nb", "x\ufffd"]))
        else:
            tokens += [rng.randrange(len(tokenizer) + 1) for _ in range(rng.randrange(1, 12))]
    return tokens[:size]


def first_complete_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text the slow way: letter by letter, at the first end of a stop string, the longest where several end."""
    for end in range(1, len(text) + 1):
        ending = [one for one in stop if text[:end].endswith(one)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def test_pieces_add_up_to_the_whole_text_for_random_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(1)
    for _ in range(150):
        tokens = random_tokens(tokenizer, rng, rng.randrange(1, 60))
        stream = TextStream(tokenizer, ())
        assert "".join(pushed(stream, tokens)) + stream.finish() == decoded(tokenizer, tokens)
        assert stream.text == decoded(tokenizer, tokens)
        assert not stream.stopped


def test_decoding_token_by_token_is_not_enough(tokenizer: PreTrainedTokenizerFast) -> None:
    """Negative control: the promise above is not kept by doing nothing."""
    tokens = of_text(tokenizer, "hello wörld 🙂 hello")
    assert "".join(decoded(tokenizer, [token]) for token in tokens) != decoded(tokenizer, tokens)


def test_text_goes_on_where_the_prompt_ended(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(2)
    for _ in range(100):
        prompt = [*of_text(tokenizer, "hello 日本 wörld" * rng.randrange(3)), *of_text(tokenizer, "he")]
        prompt += [tokenizer.eos_token_id] * rng.choice([0, 1, 30])
        tokens = random_tokens(tokenizer, rng, 20)
        stream = TextStream(tokenizer, prompt)
        text = "".join(pushed(stream, tokens)) + stream.finish()
        assert decoded(tokenizer, prompt) + text == decoded(tokenizer, [*prompt, *tokens])


def test_a_word_after_a_prompt_keeps_its_space(llama: PreTrainedTokenizerFast) -> None:
    word = ids(llama, "▁wor", "ld")
    assert decoded(llama, word) == "world"
    assert pushed(TextStream(llama, ids(llama, "▁he", "llo")), word) == [" wor", "ld"]
    assert pushed(TextStream(llama, ids(llama, "<s>")), word) == ["wor", "ld"]
    assert pushed(TextStream(llama, [*ids(llama, "▁he"), *ids(llama, "</s>") * 40]), word) == [" wor", "ld"]


def test_a_prompt_that_ends_inside_a_character_is_completed(byte_level: PreTrainedTokenizerFast) -> None:
    character = of_text(byte_level, "🙂")
    stream = TextStream(byte_level, [*of_text(byte_level, "so "), *character[:2]])
    assert pushed(stream, [*character[2:], *of_text(byte_level, "!")]) == ["", "🙂", "!"]


@pytest.mark.parametrize("end", ["\ufffd", "\ufffd\ufffd \ufffd"])
def test_a_replacement_character_of_the_prompt_is_not_repeated(tokenizer: PreTrainedTokenizerFast, end: str) -> None:
    prompt = of_text(tokenizer, "he" + end)
    assert TextStream(tokenizer, prompt).finish() == ""
    stream = TextStream(tokenizer, prompt)
    assert pushed(stream, [tokenizer.eos_token_id]) == [""]
    assert stream.finish() == ""
    stream = TextStream(tokenizer, prompt)
    assert "".join(pushed(stream, of_text(tokenizer, "he"))).strip() == "he"


def test_bytes_that_are_no_character_do_not_hold_the_text_back(byte_level: PreTrainedTokenizerFast) -> None:
    stray = of_text(byte_level, "é")[1]
    stream = TextStream(byte_level, ())
    assert pushed(stream, [stray] * 40) == [""] + ["\ufffd"] * 39
    assert stream.finish() == "\ufffd"


def test_a_run_of_byte_tokens_waits_for_its_last_byte(llama: PreTrainedTokenizerFast) -> None:
    """One wrong byte spoils the whole run, characters that were complete included: none of it is certain."""
    run = ids(llama, "<0xE2>", "<0x82>", "<0xAC>")
    assert decoded(llama, [*run, *ids(llama, "<0xFF>")]) == "\ufffd" * 4
    stream = TextStream(llama, ())
    assert pushed(stream, [*run, *run, *ids(llama, "h")]) == ["", "", "", "", "", "", "€€h"]
    stream = TextStream(llama, ())
    assert pushed(stream, [*run, *ids(llama, "<0xFF>", "</s>", "h")]) == ["", "", "", "", "", "\ufffd" * 4 + "h"]


def test_special_tokens_and_ids_without_a_token_are_silent(tokenizer: PreTrainedTokenizerFast) -> None:
    silent = [tokenizer.eos_token_id, len(tokenizer), len(tokenizer) + 100] * 20
    tokens = of_text(tokenizer, "hello wörld")
    mixed = [*silent, *(part for token in tokens for part in (token, *silent))]
    stream = TextStream(tokenizer, ())
    assert "".join(pushed(stream, mixed)) + stream.finish() == decoded(tokenizer, tokens)


class CountingTokenizer:
    """Pass everything on and note how many tokens each decoding took."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.num_decoded: list[int] = []

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded.append(len(tokens))
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.tokenizer.convert_ids_to_tokens(token)


def test_the_work_per_token_does_not_grow_with_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    counting = CountingTokenizer(tokenizer)
    prompt = of_text(tokenizer, "hello wörld " * 200)
    stream = TextStream(counting, prompt, ["never"])  # type: ignore[arg-type]
    tokens = random_tokens(tokenizer, random.Random(3), 600)
    tokens = [token for token in tokens if not str(tokenizer.convert_ids_to_tokens(token)).startswith("<0x")]
    pushed(stream, [*tokens, *of_text(tokenizer, "h"), *[tokenizer.eos_token_id] * 100])
    assert max(counting.num_decoded) <= 20
    assert len(counting.num_decoded) < 1.3 * (len(tokens) + 100)


@pytest.mark.parametrize(
    ("text", "stop", "pieces", "stopped"),
    [
        ("ab\nc", ["\n"], ["a", "b", "", ""], True),
        ("abEND", ["END"], ["a", "b", "", "", ""], True),
        ("aENb", ["END"], ["a", "", "", "ENb"], False),
        ("aENEND", ["END"], ["a", "", "", "EN", "", ""], True),
        ("xaab", ["aab"], ["x", "", "", ""], True),
        ("aaab", ["aab"], ["", "", "a", ""], True),
        ("abcd", ["abcd", "bc"], ["", "", "a", ""], True),
        ("abc", ["bc", "abc"], ["", "", ""], True),
        ("abx", ["abcd", "bc"], ["", "", "abx"], False),
    ],
)
def test_text_is_held_while_it_may_become_a_stop_string(
    byte_level: PreTrainedTokenizerFast, text: str, stop: list[str], pieces: list[str], stopped: bool
) -> None:
    stream = TextStream(byte_level, (), stop)
    assert pushed(stream, of_text(byte_level, text)) == pieces
    assert stream.stopped is stopped
    assert stream.text == first_complete_stop(text, stop)


def test_a_stop_string_counts_at_once_in_a_run_of_bytes(llama: PreTrainedTokenizerFast) -> None:
    """The run is not certain, but nothing follows a stop string that could change it."""
    stream = TextStream(llama, (), ["\n\n"])
    assert pushed(stream, ids(llama, "h", "<0x0A>", "<0x0A>")) == ["h", "", ""]
    assert stream.stopped
    assert stream.text == "h"


def test_a_stop_string_that_begins_in_the_prompt_does_not_count(byte_level: PreTrainedTokenizerFast) -> None:
    stream = TextStream(byte_level, of_text(byte_level, "EN"), ["END"])
    assert pushed(stream, of_text(byte_level, "D")) == ["D"]


def test_random_text_ends_at_the_first_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(4)
    num_stopped = 0
    for _ in range(200):
        stop = ["".join(rng.choices("hel o", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        tokens = of_text(tokenizer, "".join(rng.choices(["h", "e", "l", "o", " ", "lo", "é"], k=30)))
        stream = TextStream(tokenizer, (), stop)
        pieces = []
        for num_pushed, token in enumerate(tokens, 1):
            pieces.append(stream.push(token))
            complete = first_complete_stop(decoded(tokenizer, tokens[:num_pushed]), stop)
            assert stream.stopped == (complete != decoded(tokenizer, tokens[:num_pushed]))
            if stream.stopped:
                break
        num_stopped += stream.stopped
        text = "".join(pieces) + stream.finish()
        assert text == stream.text == first_complete_stop(decoded(tokenizer, tokens), stop)
    assert 40 < num_stopped < 200


@pytest.mark.parametrize(("stop", "problem"), [(["a", ""], "empty string at place 1"), ("END", r"Write \['END'\]")])
def test_a_stop_that_cannot_be_meant_is_refused(
    byte_level: PreTrainedTokenizerFast, stop: Sequence[str], problem: str
) -> None:
    with pytest.raises(MtpError, match=problem):
        TextStream(byte_level, (), stop)
