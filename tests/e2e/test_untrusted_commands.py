"""Every command that opens a checkpoint from anywhere: exit 2, one message, nothing written and nothing left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from adapters import write_adapter
from mtp_train.checkpoints.files import CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from mtp_train.cli.main import main
from runs import tree, write_recipe

Monkey = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
FOUR_ANSWERS = re.compile(r"mtp-train: [^\n]+: [^\n]+; expected [^\n]+\. [A-Z][^\n]+[.?]\n")
OPENING = ("inspect", "graft", "merge", "export", "generate", "evaluate", "check", "run")


@pytest.fixture
def inputs(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "in"))


@pytest.fixture(scope="module")
def adapter(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapter") / "lora"
    write_adapter(pristine / "finetune", out, target_modules=["q_proj"])
    return out


class Broken(NamedTuple):
    do: Callable[[Path], Any]
    """Given the checkpoint."""
    message: str
    commands: tuple[str, ...] = OPENING


def strange_dtype(path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F8_E4M3FNUZ", "shape": [8], "data_offsets": [0, 8]}}).encode()
    (path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def index_without_names(path: Path) -> None:
    (path / SINGLE_FILE).unlink()
    (path / INDEX_FILE).write_text('{"weight_map": ["model.safetensors"]}')


def many_layers(path: Path) -> None:
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | {"num_hidden_layers": 10**9}))


READING_WEIGHTS = tuple(name for name in OPENING if name != "check")
BROKEN = {
    "dtype": Broken(strange_dtype, "x is stored as F8_E4M3FNUZ", READING_WEIGHTS),
    "index": Broken(index_without_names, "weight_map is .*; expected an object", READING_WEIGHTS),
    "config": Broken(many_layers, "num_hidden_layers is 1000000000; expected a number up to 1000"),
    "generation config": Broken(
        lambda path: (path / GENERATION_CONFIG_FILE).write_text("[1]"), "contains list", READING_WEIGHTS
    ),
    "tokenizer": Broken(
        lambda path: (path / "tokenizer.json").write_text("[1]"), "contains list", ("generate", "evaluate", "run")
    ),
    "failing template": Broken(
        lambda path: (path / "chat_template.jinja").write_text("{{ 1 / 0 }}"),
        "fails on it .ZeroDivisionError",
        ("chat", "evaluate", "run"),
    ),
}


def argv_of(command: str, inputs: Path, adapter: Path, recipe: Path, out: Path) -> list[str]:
    checkpoint, written = inputs / "finetune", ["--out", out]
    argv: list[Any] = {
        "inspect": [checkpoint],
        "graft": [checkpoint, "--from", inputs / "base", *written],
        "merge": [checkpoint, "--adapter", adapter, *written],
        "export": [checkpoint, *written],
        "generate": [checkpoint, "--depth", 0, "--prompt", "say 1"],
        "chat": [checkpoint, "--depth", 0, "--prompt", "say 1", "--chat"],
        "evaluate": [checkpoint, "--head", inputs / "base", "--suite", inputs / "chats.jsonl", *written],
        "check": [recipe],
        "run": [recipe],
    }[command]
    return [{"chat": "generate"}.get(command, command), *map(str, argv)]


@pytest.mark.parametrize(("kind", "command"), [(kind, name) for kind, one in BROKEN.items() for name in one.commands])
def test_a_broken_checkpoint_is_one_message_and_nothing_is_left(
    kind: str, command: str, inputs: Path, adapter: Path, tmp_path: Path, capfd: Capture
) -> None:
    BROKEN[kind].do(inputs / "finetune")
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "new" / "run")
    before = tree(tmp_path)
    capfd.readouterr()
    assert main(argv_of(command, inputs, adapter, recipe, tmp_path / "new" / "out")) == 2
    printed = capfd.readouterr()
    assert FOUR_ANSWERS.fullmatch(printed.err), printed.err
    assert printed.out in ("", "1 process on cpu, no shards\n")
    assert re.search(BROKEN[kind].message, printed.err)
    if command == "run":
        # The outcome is the one file that a refused run writes.
        assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["outcome.json"]
        shutil.rmtree(tmp_path / "new")
    assert tree(tmp_path) == before


# Model cards


def test_a_card_that_cannot_be_read_does_not_stop_the_copy(inputs: Path, tmp_path: Path) -> None:
    card = b"---\n[1, 2]\n---\n# Caf\xe9\n"
    (inputs / "finetune" / "README.md").write_bytes(card)
    argv = ["graft", str(inputs / "finetune"), "--from", str(inputs / "base"), "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "## Serve it" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert (inputs / "finetune" / "README.md").read_bytes() == card


def test_a_directory_in_the_place_of_the_card_is_copied(inputs: Path, tmp_path: Path) -> None:
    (inputs / "finetune" / "README.md").mkdir()
    (inputs / "finetune" / "README.md" / "page").write_text("text")
    argv = ["graft", str(inputs / "finetune"), "--from", str(inputs / "base"), "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert (tmp_path / "out" / "README.md" / "page").read_text() == "text"


def test_a_copy_whose_card_cannot_be_written_is_removed(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mtp_train.runs.export.write_text", fail)
    before = tree(tmp_path)
    argv = ["graft", str(inputs / "finetune"), "--from", str(inputs / "base"), "--out", str(tmp_path / "out")]
    with pytest.raises(RuntimeError, match="a bug"):
        main(argv)
    assert tree(tmp_path) == before
