"""One finished run for all tests that only look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.cli import main
from runs import LEARNS, write_inputs, write_recipe


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, its stripped fine-tune and chats."""
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@pytest.fixture(scope="session")
def recipe(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has finished and exported, in ``run`` beside it."""
    directory = tmp_path_factory.mktemp("finished")
    path = write_recipe(directory / "recipe.yaml", inputs, directory / "run", **LEARNS)
    assert main(["run", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def run_dir(recipe: Path) -> Path:
    """The run directory of that recipe."""
    return recipe.parent / "run"
