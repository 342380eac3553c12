"""The public API of the decoder: its names and signatures, its examples, and text in and out."""

from __future__ import annotations

import doctest
import pkgutil
from pathlib import Path

import pytest

import mtp_inference
from byte_tokenizer import byte_tokenizer
from mtp_inference import Request, Sampling, SpeculativeDecoder
from mtp_train.checkpoints.artifact import Artifact, save_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import CheckpointError, DataError, MtpError, UnsupportedModelError
from mtp_train.heads.build import graft_plan
from plain_decoding import plain_greedy

PROMPT = "<|im_start|>user\nsay 1<|im_end|>\n<|im_start|>assistant\n"


def test_no_public_name_is_that_of_a_module() -> None:
    modules = {one.name.rpartition(".")[2] for one in pkgutil.walk_packages(mtp_inference.__path__, "mtp_inference.")}
    assert {"decoder", "requests", "batch"} <= modules
    assert not modules & set(mtp_inference.__all__)


@pytest.mark.parametrize("name", mtp_inference.__all__)
def test_the_examples_of_a_public_name_run(name: str) -> None:
    runner = doctest.DocTestRunner()
    for one in doctest.DocTestFinder().find(getattr(mtp_inference, name), name):
        runner.run(one)
    assert runner.summarize().failed == 0


@pytest.fixture(scope="module")
def decoder(pristine: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(pristine / "base", device="cpu")


def ids(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


def test_text_in_and_text_out_is_plain_decoding_of_its_tokens(decoder: SpeculativeDecoder) -> None:
    results = decoder.generate([PROMPT, "ab"], max_new_tokens=12)
    for prompt, result in zip([PROMPT, "ab"], results, strict=True):
        plain = plain_greedy(decoder.trunk, ids(prompt), 12, decoder.eos_ids)
        assert list(result.token_ids) == plain
        assert result.text == byte_tokenizer().decode(plain, skip_special_tokens=True)
        assert result.num_draft_tokens == 3 * result.num_drafts > 0
    (alone,) = decoder.generate("ab", max_new_tokens=12)
    assert alone.token_ids == results[1].token_ids
    assert decoder.generate([]) == []


def test_each_further_prompt_has_the_next_seed(decoder: SpeculativeDecoder) -> None:
    first, second = decoder.generate([PROMPT, ids(PROMPT)], 12, sampling=Sampling(temperature=1.0, seed=7))
    assert first.token_ids != second.token_ids
    (alone,) = decoder.generate(PROMPT, 12, sampling=Sampling(temperature=1.0, seed=8))
    assert alone.token_ids == second.token_ids


def test_a_chat_prompt_goes_through_the_template(decoder: SpeculativeDecoder) -> None:
    (of_chat,) = decoder.generate("say 1", 8, chat=True)
    assert of_chat.token_ids == decoder.generate(PROMPT, 8)[0].token_ids


def test_a_request_keeps_its_own_settings(decoder: SpeculativeDecoder) -> None:
    request = Request(prompt_ids=ids(PROMPT), max_new_tokens=6, mtp="off")
    own, shared = decoder.generate([request, PROMPT], 9)
    assert (len(own.token_ids), own.num_drafts) == (6, 5)
    assert own.num_draft_tokens == 0 < shared.num_draft_tokens
    assert own.token_ids == shared.token_ids[:6]


def test_what_drafts_is_named(pristine: Path, tmp_path: Path, decoder: SpeculativeDecoder) -> None:
    plan = graft_plan(open_checkpoint(pristine / "base"), open_checkpoint(pristine / "base"), "auto")
    save_artifact(Artifact(**vars(plan), num_depths=3, notes={}), tmp_path / "head")
    (tmp_path / "recipe.yaml").touch()
    expected = SpeculativeDecoder.from_pretrained(pristine / "finetune", depth=0, device="cpu").generate(PROMPT, 12)[0]
    assert expected.num_draft_tokens == 0
    for head in (pristine / "base", tmp_path / "head", tmp_path, "ngram"):
        named = SpeculativeDecoder.from_pretrained(pristine / "finetune", head=head, depth=2, device="cpu")
        (result,) = named.generate(PROMPT, 12)
        assert result.token_ids == expected.token_ids
        assert result.num_drafts > 0


def test_what_cannot_be_loaded_or_decoded_is_refused(pristine: Path, decoder: SpeculativeDecoder) -> None:
    with pytest.raises(CheckpointError, match=r"holds no head tensors .*; expected a head to draft with"):
        SpeculativeDecoder.from_pretrained(pristine / "finetune")
    with pytest.raises(MtpError, match=r"depth: 8; expected 0 to 7"):
        SpeculativeDecoder.from_pretrained(pristine / "base", depth=8)
    with pytest.raises(MtpError, match=r"prompt 1: text, and the decoder has no tokenizer"):
        SpeculativeDecoder(decoder.trunk, None, 0, ()).generate("a")
    with pytest.raises(DataError, match=r"prompt 2: no token; expected some text"):
        decoder.generate(["a", ""])
    images = SpeculativeDecoder(decoder.trunk, None, 0, (), tokenizer=byte_tokenizer(), image_ids=ids("#"))
    with pytest.raises(DataError, match=r"prompt 1: holds image or video token"):
        images.stream("a#b")
    assert issubclass(UnsupportedModelError, MtpError)
