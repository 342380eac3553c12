"""Every test that is written is collected: a file pytest never sees passes for ever."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import conftest

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent


def names_of_tests(tree: ast.Module) -> list[str]:
    """Return the test functions of a file, methods as Class::name, in order, repeated names repeated."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.append(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += [
                f"{node.name}::{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test_")
            ]
    return found


def unseen(tests: Path) -> list[str]:
    """Return the files with test functions that pytest does not collect by their name."""
    return [
        path.name
        for path in sorted(tests.rglob("*.py"))
        if not path.name.startswith("test_") and names_of_tests(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_every_written_test_is_collected() -> None:
    assert unseen(TESTS) == []


def test_a_misnamed_file_is_noticed(tmp_path: Path) -> None:
    for name in ("test_seen.py", "unseen_test_file.py"):
        (tmp_path / name).write_text("def test_promise():\n    assert True\n")
    assert unseen(tmp_path) == ["unseen_test_file.py"]


def test_no_two_test_files_share_a_name() -> None:
    """Without __init__.py files pytest imports test files by their bare name."""
    names = Counter(path.name for path in TESTS.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == []
    assert list(TESTS.rglob("__init__.py")) == []


def test_no_test_replaces_another_of_its_name() -> None:
    twice = [
        f"{path.name}::{name}"
        for path in TESTS.rglob("test_*.py")
        for name, count in Counter(names_of_tests(ast.parse(path.read_text(encoding="utf-8")))).items()
        if count > 1
    ]
    assert twice == []


def test_only_what_is_marked_gpu_is_skipped_below_a_directory_of_that_name(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the directories above a test are keywords of it, as its marks are."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    item = request.node
    item.keywords["gpu"] = True
    conftest.pytest_collection_modifyitems([item])
    assert item.get_closest_marker("skip") is None
    item.add_marker(pytest.mark.gpu)
    conftest.pytest_collection_modifyitems([item])
    assert item.get_closest_marker("skip") is not None


ABSENT = ("wandb", "deepspeed")
WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, *place):
        return None if name.partition(".")[0] in {absent} else super().find_spec(name, *place)
sys.meta_path[sys.meta_path.index(PathFinder)] = Others
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", *{files}]))
"""


@pytest.mark.slow
def test_the_gpu_tests_are_collected_without_what_a_measuring_machine_lacks() -> None:
    """And skipped by name without an accelerator."""
    paths = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    files = [str(path) for path in paths if path != Path(__file__)]
    assert len(files) >= 2
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT.format(absent=ABSENT, files=files)]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped", done.stdout, re.MULTILINE), done.stdout
    assert "gpu: torch sees no accelerator here" in done.stdout
