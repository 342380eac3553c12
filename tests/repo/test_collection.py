"""Every test that is written is collected: a file pytest never sees passes for ever."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import conftest

TESTS = Path(__file__).parents[1]


def has_tests(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree))


def unseen(tests: Path) -> list[str]:
    """Return the files with test functions that pytest does not collect by their name."""
    return [
        path.name
        for path in sorted(tests.rglob("*.py"))
        if not path.name.startswith("test_") and has_tests(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_every_written_test_is_collected() -> None:
    assert unseen(TESTS) == []


def test_a_misnamed_file_is_noticed(tmp_path: Path) -> None:
    for name in ("test_seen.py", "unseen_test_file.py"):
        (tmp_path / name).write_text("def test_promise():\n    assert True\n")
    assert unseen(tmp_path) == ["unseen_test_file.py"]


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
