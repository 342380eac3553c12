"""What one process of a launch wrote must be what every other process reads."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import TrainingError
from mtp_train.runs import run as run_module
from mtp_train.runs.run import files_in, require_alike, require_shared, text_checksum


class Launch:
    """Two processes: the one that asks, and one that sees another directory."""

    def __init__(self, other: Path, names: list[str]) -> None:
        self.other, self.names, self.calls = other, names, 0

    def gather_items(self, own: list[Any]) -> list[Any]:
        self.calls += 1
        return [*own, files_in(self.other, self.names)]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, without making them."""
    made: list[float] = []
    monkeypatch.setattr(run_module.time, "sleep", made.append)
    return made


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    mine = tmp_path / "mine"
    (mine / "head").mkdir(parents=True)
    (mine / "head" / "config.json").write_text("{}")
    (mine / "recipe.yaml").write_text("seed: 1\n")
    return mine, Path(shutil.copytree(mine, tmp_path / "theirs"))


NAMES = ["recipe.yaml", "head", "missing"]


@pytest.mark.parametrize("how", ["missing", "longer", "other_content"])
def test_different_files_are_named(how: str, directories: tuple[Path, Path]) -> None:
    mine, theirs = directories
    file = theirs / "head" / "config.json"
    match how:
        case "missing":
            shutil.rmtree(theirs / "head")
        case "longer":
            file.write_text("{}" + " " * run_module.SMALL_BYTES)
        case _:
            file.write_text("[]")
    launch: Any = Launch(theirs, NAMES)
    with pytest.raises(
        TrainingError, match=r"processes 0 and 1 see different files \(head/config.json\); expected one"
    ):
        require_shared(mine, NAMES, launch)
    assert launch.calls == run_module.ATTEMPTS


def test_a_file_system_that_shows_files_late_is_waited_for(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = directories
    (theirs / "recipe.yaml").unlink()
    launch: Any = Launch(theirs, NAMES)
    monkeypatch.setattr(run_module.time, "sleep", lambda _: shutil.copy(mine / "recipe.yaml", theirs / "recipe.yaml"))
    require_shared(mine, NAMES, launch)
    assert launch.calls == 2


class TwoMachines:
    """Two processes, of which the second has other inputs, or the same."""

    def __init__(self, second: str) -> None:
        self.second = second

    def gather_items(self, own: list[Any]) -> list[Any]:
        return [*own, ({"model": "m", "data": self.second}, "node-1")]


def test_inputs_that_differ_between_machines_are_named() -> None:
    alike: Any = TwoMachines("abc")
    require_alike({"model": "m", "data": "abc"}, alike)
    with pytest.raises(TrainingError, match=r"^data: the files of process 1 on node-1 differ .*; expected the same on"):
        require_alike({"model": "m", "data": "abd"}, alike)


DOCUMENT = Document([1, 2, 3], [False, True, True], "g", "a")
PROMPT = Prompt("a", "g", (1, 2))


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        (DOCUMENT, {"input_ids": [1, 2, 4]}),
        (DOCUMENT, {"loss_mask": [True, True, True]}),
        (DOCUMENT, {"group": "h"}),
        (PROMPT, {"prompt_ids": (1, 3)}),
        (PROMPT, {"id": "b"}),
    ],
)
def test_the_checksum_of_text_depends_on_everything_that_is_trained_on(changed: Any, values: dict[str, Any]) -> None:
    other = dataclasses.replace(changed, **values)
    texts = [DOCUMENT if changed is PROMPT else other], [PROMPT if changed is DOCUMENT else other]
    assert text_checksum(*texts) != text_checksum([DOCUMENT], [PROMPT])
    assert text_checksum([DOCUMENT], [PROMPT]) == text_checksum([dataclasses.replace(DOCUMENT)], [PROMPT])
