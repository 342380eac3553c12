"""A study's directory belongs to its arms by their content, wherever they lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from mtp_train.checkpoints.identity import directory_files
from mtp_train.cli.main import main
from mtp_train.errors import ChangedInputError, OutputExistsError
from mtp_train.evaluation.arms import ArmSpec
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.store import Store
from simulated_drafters import decoded

SILENT = Progress(disable=True)


def arm(**fields: Any) -> dict[str, Any]:
    return {"arms": [replace(ArmSpec("a", "x", "own"), **fields).identity()]}


def directory(path: Path, text: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_text(text)
    return path


def opened(out: Path, identity: dict[str, Any], *inputs: Path) -> Store:
    """Open a study up to what comes before its first measurement."""
    store = Store(out, identity)
    store.hash_inputs({f"a: {path.name}": directory_files(path) for path in inputs}, SILENT)
    return store


@pytest.mark.parametrize(
    "other",
    [{"name": "b"}, {"head": "ngram"}, {"head": "model:y"}, {"head": "y"}, {"adapter": "y"}, {"quantization": "8bit"}],
    ids=str,
)
def test_other_arms_are_refused_and_moved_ones_are_not(other: dict[str, Any], tmp_path: Path) -> None:
    Store(tmp_path, arm()).claim()
    Store(tmp_path, arm(trunk="elsewhere"))
    with pytest.raises(OutputExistsError, match=r"another study \(its arms differ"):
        Store(tmp_path, arm(**other))


def test_a_directory_with_other_files_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputExistsError, match=r"not a study's \(notes.txt\)"):
        Store(tmp_path, arm())
    assert main(["evaluate", "demo:base", "--out", str(tmp_path / "notes.txt")]) == 2
    assert "notes.txt: writing the report failed (File exists)" in capfd.readouterr().err


def test_an_input_that_was_none_is_refused(tmp_path: Path, out: Path) -> None:
    trunk = directory(tmp_path / "trunk", "1")
    head = directory(tmp_path / "head", "1")
    opened(out, arm(), trunk).claim()
    opened(out, arm(), trunk)
    with pytest.raises(ChangedInputError, match=r"a: head \(.*\) was not among them; expected"):
        opened(out, arm(), trunk, head)


def test_a_record_that_a_kill_left_without_its_claim_is_not_the_next_ones(tmp_path: Path, out: Path) -> None:
    trunk = directory(tmp_path / "trunk", "1")
    opened(out, arm(), trunk).claim()
    # Killed before the claim itself was written.
    (out / "study.json").unlink()
    directory(trunk, "2")
    opened(out, arm(), trunk).claim()
    opened(out, arm(), trunk)
    directory(trunk, "1")
    with pytest.raises(ChangedInputError, match=r"a: trunk \(.*trunk\): model\.safetensors; expected"):
        opened(out, arm(), trunk)


def test_several_processes_write_and_each_reads_all(tmp_path: Path) -> None:
    first = Store(tmp_path, arm())
    first.claim()
    second = Store(tmp_path, arm(), writer=1)
    setting = Setting(1.0, None, 3, "argmax")
    # A setting whose file names begin with the other one's.
    filtered = Setting(1.0, None, 3, "argmax", 0.9)
    first.add("a", setting, [decoded([1], "p0")])
    second.add("a", setting, [decoded([1], "p1")])
    second.add("a", filtered, [decoded([1], "p2")])
    for number in (0, 1, 7):
        store = Store(tmp_path, arm(), writer=number)
        assert sorted(store.read("a", setting)) == ["p0", "p1"]
        assert sorted(store.read("a", filtered)) == ["p2"]
