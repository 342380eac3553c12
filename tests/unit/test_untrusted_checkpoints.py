"""Checkpoints from anywhere: each kind of damage is one message that names the file, raised where it is parsed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import byte_tokenizer
from checkpoints import save_with_head, set_fields, shard
from json_files import read_json, write_json
from mtp_train.checkpoints.files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    open_checkpoint,
    read_config,
    scan_safetensors,
)
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.errors import MtpError
from mtp_train.runs.checkpoint_tools.inspect import inspect
from runs import BYTE_VOCAB_SIZE
from tiny import tiny_head, tiny_trunk

# Where, what was found, what was expected, what to do about it.
FOUR_ANSWERS = re.compile(r"[^\n]+: [^\n]+; expected [^\n]+\. [A-Z][^\n]+[.?]")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trunk = tiny_trunk("qwen3_5", vocab_size=BYTE_VOCAB_SIZE)
    path = save_with_head(trunk, tiny_head(trunk), tmp_path_factory.mktemp("whole") / "checkpoint")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint whose small files are copies and whose weights are a link."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for file in whole.iterdir():
        if file.name == SINGLE_FILE:
            os.link(file, path / file.name)
        else:
            (path / file.name).write_bytes(file.read_bytes())
    return path


def refusal(do: Callable[[], Any]) -> str:
    with pytest.raises(MtpError) as caught:
        do()
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert FOUR_ANSWERS.fullmatch(message), message
    assert len(message) < 2000
    return message


def write_header(file: Path, header: bytes, data: bytes = b"") -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    write_header(tmp_path / SINGLE_FILE, json.dumps({"x": entry("C64", [2], (0, 16))}).encode(), bytes(16))
    assert "C64" in refusal(lambda: scan_safetensors(tmp_path / SINGLE_FILE))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\0\0",
        (10**9).to_bytes(8, "little") + b"{}",
        (6).to_bytes(8, "little") + b"{nope}",
        (600_001).to_bytes(8, "little") + nested(100_000),
    ],
)
def test_a_file_that_is_not_safetensors_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    assert "truncated or damaged" in refusal(lambda: scan_safetensors(tmp_path / SINGLE_FILE))


# The directory


def add_a_ghost(checkpoint: Path) -> None:
    index = read_json(shard(checkpoint) / INDEX_FILE)
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    write_json(checkpoint / INDEX_FILE, index)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / SINGLE_FILE).rename(path / "a.bin"), r"pickles \(a\.bin\), which can run code when read"),
        (lambda path: (path / SINGLE_FILE).unlink(), r"no weights; expected model\.safetensors"),
        (lambda path: (path / CONFIG_FILE).unlink(), r"config\.json: no such file"),
        (shutil.rmtree, "not a directory; expected a checkpoint directory or a hub id"),
        (add_a_ghost, r"lists model\.ghost\.weight .* which does not contain it"),
    ],
)
def test_a_directory_that_is_no_whole_checkpoint_is_named(
    damage: Callable[[Path], Any], message: str, checkpoint: Path
) -> None:
    damage(checkpoint)
    assert re.search(message, refusal(lambda: inspect(checkpoint)))


def test_a_hub_name_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refusal(lambda: inspect("no-such-owner/no-such-model"))
    assert said.startswith("no-such-owner/no-such-model: neither a local directory nor a hub model")


# Index


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ([1, 2], r"weight_map is \[1, 2\]; expected an object"),
        ({"x": 3}, "names 3; expected the path"),
        ({"x": ""}, "names ''; expected the path"),
        ({"x": "a\0b"}, "no such file; expected a shard"),
        ({"x": "gone.safetensors"}, "gone.safetensors: no such file; expected a shard"),
        ({"x": CONFIG_FILE}, "truncated or damaged"),
        ({}, "the trunk's embedding is missing"),
    ],
)
def test_a_weight_map_of_any_shape_is_named(weight_map: object, message: str, checkpoint: Path) -> None:
    (checkpoint / SINGLE_FILE).unlink()
    write_json(checkpoint / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    found = refusal(lambda: inspect(checkpoint))
    assert str(checkpoint) in found
    assert re.search(message, found)


NOT_OBJECTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "not JSON": (b"{nope", "not valid JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not valid JSON"),
    "list": (b"[1, 2]", "contains list"),
    "nested too deep": (nested(100_000), "nested too deep"),
    "integer of thousands of digits": (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize(("content", "message"), NOT_OBJECTS.values(), ids=NOT_OBJECTS.keys())
@pytest.mark.parametrize("name", [INDEX_FILE, CONFIG_FILE, GENERATION_CONFIG_FILE, "tokenizer_config.json"])
def test_a_file_that_is_no_json_object_is_named(name: str, content: bytes, message: str, checkpoint: Path) -> None:
    if name == INDEX_FILE:
        (checkpoint / SINGLE_FILE).unlink()
    (checkpoint / name).write_bytes(content)
    found = refusal(lambda: load_tokenizer(open_checkpoint(checkpoint)))
    assert found.startswith(f"{checkpoint / name}: ")
    assert message in found


# Config

FIELDS: list[tuple[str, object, str]] = [
    ("hidden_size", None, "transformers rejects it"),
    # Nothing is converted, although Python and pydantic would.
    *(("hidden_size", value, "hidden_size is .*; expected a valid integer") for value in ("64", [32], True, 32.0)),
    *(("hidden_size", value, "hidden_size is .*; expected greater than 0") for value in (-1, 0)),
    ("num_hidden_layers", 10**400, "num_hidden_layers is 1000.*; expected less than or equal to 1000"),
    ("mtp_num_hidden_layers", "1", "mtp_num_hidden_layers is '1'; expected an integer"),
    ("mtp_num_hidden_layers", 10**9, "mtp_num_hidden_layers is 1000000000; expected an integer up to 1000"),
    *((name, None, "transformers rejects it") for name in ("num_attention_heads", "num_hidden_layers")),
    ("rms_norm_eps", "small", "transformers rejects it"),
    ("hidden_act", "nope", "transformers rejects it .KeyError"),
    ("text_config", [1], r"text_config is \[1\]; expected an object"),
    (
        "vision_config",
        {"depth": 10**9},
        "vision_config.depth is 1000000000; expected less than or equal to 1000 or a valid list",
    ),
    ("quantization_config", [1], r"quantization_config is \[1\]; expected an object"),
    ("rope_parameters", 3, "rope_parameters is 3; expected a valid dictionary"),
    ("model_type", ["qwen3_5_text"], "model_type is .*; expected a valid string"),
    ("architectures", [3], r"architectures is \[3\]; expected a valid string"),
    ("eos_token_id", {"a": 1}, "eos_token_id is .*; expected a valid integer or a valid list"),
    ("eos_token_id", 10**400, "eos_token_id is 1000.*; expected less than"),
]


@pytest.mark.parametrize(("field", "value", "message"), FIELDS, ids=[f"{name}={str(v)[:12]}" for name, v, _ in FIELDS])
def test_a_config_field_of_wrong_type_or_size_is_named(
    field: str, value: object, message: str, checkpoint: Path
) -> None:
    config = read_json(checkpoint / CONFIG_FILE)
    write_json(checkpoint / CONFIG_FILE, config | {field: value})
    found = refusal(lambda: inspect(checkpoint))
    assert str(checkpoint) in found
    assert re.search(message, found)


def test_a_nested_config_is_checked_too(checkpoint: Path) -> None:
    config = read_json(checkpoint / CONFIG_FILE)
    wrapped = {"model_type": "qwen3_5", "text_config": config}
    write_json(checkpoint / CONFIG_FILE, wrapped)
    assert read_config(checkpoint / CONFIG_FILE) == wrapped
    set_fields(checkpoint, {"num_hidden_layers": "2"})
    assert "text_config.num_hidden_layers is '2'" in refusal(lambda: open_checkpoint(checkpoint))


# Generation config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; expected a valid number"),
        ({"temperature": 10**400}, "temperature is 1000.*; expected"),
        ({"top_k": 0.5}, "top_k is 0.5; expected a valid integer"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; expected a valid boolean"),
        ({"eos_token_id": [1, None]}, r"eos_token_id is \[1, None\]; expected a valid integer"),
        ({"suppress_tokens": 3}, "transformers rejects it"),
    ],
)
def test_a_generation_config_of_any_shape_is_named(content: object, message: str, checkpoint: Path) -> None:
    file = checkpoint / GENERATION_CONFIG_FILE
    write_json(file, {"do_sample": True, "temperature": 0.7, "eos_token_id": [1, 2]})
    open_checkpoint(checkpoint)
    write_json(file, content)
    found = refusal(lambda: inspect(checkpoint))
    assert found.startswith(f"{file}: ")
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("content", "expected"), [(None, {5}), ({}, set()), ({"eos_token_id": 7}, {7}), ({"eos_token_id": [7, 8]}, {7, 8})]
)
def test_the_generation_config_decides_the_end_of_text_where_it_exists(
    content: dict[str, Any] | None, expected: set[int], checkpoint: Path
) -> None:
    set_fields(checkpoint, {"eos_token_id": 5})
    (checkpoint / GENERATION_CONFIG_FILE).unlink(missing_ok=True)
    if content is not None:
        write_json(checkpoint / GENERATION_CONFIG_FILE, content)
    opened = open_checkpoint(checkpoint)
    tokenizer = load_tokenizer(opened)
    assert eos_token_ids(opened, tokenizer) == expected | {tokenizer.eos_token_id}


# Tokenizer


def changed_tokenizer(checkpoint: Path, **fields: Any) -> None:
    document = read_json(checkpoint / "tokenizer.json")
    model = document["model"] | fields.pop("model", {})
    write_json(checkpoint / "tokenizer.json", {**document, "model": model, **fields})


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda path: changed_tokenizer(path, model={"vocab": 3}), "no tokenizer that loads"),
        (lambda path: (path / "added_tokens.json").write_text("3"), "added_tokens.json: contains int"),
        (lambda path: (path / "special_tokens_map.json").write_text("[1]"), "special_tokens_map.json: contains list"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"model_max_length": "8"}'), "model_max_length is"),
        (
            lambda path: [(path / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
            "no tokenizer that loads",
        ),
    ],
)
def test_a_broken_tokenizer_is_named(do: Callable[[Path], Any], message: str, checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    load_tokenizer(opened)
    do(checkpoint)
    found = refusal(lambda: load_tokenizer(opened))
    assert str(checkpoint) in found
    assert message in found


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(checkpoint: Path) -> None:
    vocabulary = read_json(checkpoint / "tokenizer.json")["model"]["vocab"]
    changed_tokenizer(checkpoint, model={"vocab": vocabulary | {"A": BYTE_VOCAB_SIZE}})
    found = refusal(lambda: load_tokenizer(open_checkpoint(checkpoint)))
    assert f"the tokenizer has the id {BYTE_VOCAB_SIZE} for 'A' (1 such tokens)" in found
