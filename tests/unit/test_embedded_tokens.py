"""Tokens that the tokenizer has and the model has no embedding for: one message, wherever they come in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.progress import Progress

from mtp_inference import SpeculativeDecoder
from mtp_train.errors import DataError
from mtp_train.runs.inputs import gather_inputs
from runs import BYTE_VOCAB_SIZE, tiny_recipe, write_inputs
from tiny import tiny_trunk

IMAGE = "<image>"


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A fine-tune whose tokenizer has one token too many, as that of Gemma 3's text models."""
    from byte_tokenizer import byte_tokenizer

    directory = write_inputs(tmp_path / "in")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(IMAGE) >= BYTE_VOCAB_SIZE
    tokenizer.save_pretrained(directory / "finetune")
    return directory


def add_chat(inputs: Path, role: str) -> None:
    """Put the token into one turn of one more chat."""
    chat = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "yes"}]
    chat = [{**turn, "content": f"{turn['content']} {IMAGE}"} if turn["role"] == role else turn for turn in chat]
    with (inputs / "chats.jsonl").open("a") as file:
        file.writelines(json.dumps({"messages": chat, "group": f"more{number}"}) + "\n" for number in range(8))


@pytest.mark.parametrize(("role", "regenerate"), [("assistant", None), ("user", None), ("user", {})])
def test_text_with_such_a_token_is_refused_before_anything_runs(
    inputs: Path, role: str, regenerate: dict[str, bool] | None
) -> None:
    recipe = tiny_recipe(inputs, inputs / "run", data__regenerate=regenerate)
    add_chat(inputs, role)
    with (
        Progress(disable=True) as progress,
        pytest.raises(DataError, match=rf"record \d+: has the token '{IMAGE}' with the id \d+; expected ids below"),
    ):
        gather_inputs(recipe, 1, progress, judges=True)


def test_the_decoder_names_the_prompt() -> None:
    trunk = tiny_trunk("qwen3_5")
    decoder = SpeculativeDecoder(trunk, None, 0, ())
    with pytest.raises(DataError, match=rf"has the token id {trunk.config.vocab_size}; expected ids from 0 to"):
        decoder.generate([[1, 2], [3, trunk.config.vocab_size]], 4)
