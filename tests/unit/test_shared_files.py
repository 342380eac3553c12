"""What one process of a launch wrote must be what every other process reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import TrainingError
from mtp_train.job import shared_files
from mtp_train.job.shared_files import files_in, require_shared


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
    monkeypatch.setattr(shared_files.time, "sleep", made.append)
    return made


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    mine = tmp_path / "mine"
    (mine / "head").mkdir(parents=True)
    (mine / "head" / "config.json").write_text("{}")
    (mine / "recipe.yaml").write_text("seed: 1\n")
    return mine, Path(shutil.copytree(mine, tmp_path / "theirs"))


NAMES = ["recipe.yaml", "head", "missing"]


def test_equal_files_pass_at_once(directories: tuple[Path, Path], pauses: list[float]) -> None:
    mine, theirs = directories
    launch: Any = Launch(theirs, NAMES)
    require_shared(mine, NAMES, launch)
    assert (launch.calls, pauses) == (1, [])


@pytest.mark.parametrize("how", ["missing", "longer", "other_content"])
def test_different_files_are_named(how: str, directories: tuple[Path, Path]) -> None:
    mine, theirs = directories
    file = theirs / "head" / "config.json"
    match how:
        case "missing":
            shutil.rmtree(theirs / "head")
        case "longer":
            file.write_text("{}" + " " * shared_files.SMALL_BYTES)
        case _:
            file.write_text("[]")
    launch: Any = Launch(theirs, NAMES)
    with pytest.raises(
        TrainingError, match=r"processes 0 and 1 see different files \(head/config.json\); expected one"
    ):
        require_shared(mine, NAMES, launch)
    assert launch.calls == shared_files.ATTEMPTS


def test_a_file_system_that_shows_files_late_is_waited_for(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = directories
    (theirs / "recipe.yaml").unlink()
    launch: Any = Launch(theirs, NAMES)
    monkeypatch.setattr(shared_files.time, "sleep", lambda _: shutil.copy(mine / "recipe.yaml", theirs / "recipe.yaml"))
    require_shared(mine, NAMES, launch)
    assert launch.calls == 2
