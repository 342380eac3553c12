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


def written(repository: Path) -> set[str]:
    """Return "file::test" for every test function under tests/, whatever its file is called."""
    return {
        f"{path.relative_to(repository).as_posix()}::{name}"
        for path in (repository / "tests").rglob("*.py")
        for name in names_of_tests(ast.parse(path.read_text(encoding="utf-8")))
    }


def collected(repository: Path) -> set[str]:
    """Return "file::test" for everything that plain pytest collects, parameters left out.

    Of a file that skips itself by name (a witness that this transformers lacks), all tests count as collected.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-rs", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    skipped = {match[1] for line in lines if (match := re.match(r"SKIPPED \[\d+\] (tests/\S+?):\d+: ", line))}
    return {line.split("[")[0] for line in lines if re.match(r"tests/\S+\.py::", line)} | {
        test for test in written(repository) if test.split("::")[0] in skipped
    }


def test_every_written_test_is_collected() -> None:
    assert collected(REPOSITORY) == written(REPOSITORY)


def test_a_misnamed_file_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for name in ("test_seen.py", "unseen_test_file.py"):
        (tmp_path / "tests" / name).write_text("def test_promise():\n    assert True\n")
    (tmp_path / "tests" / "test_skipped.py").write_text(
        "import pytest\npytest.skip('no witness', allow_module_level=True)\ndef test_promise():\n    assert True\n"
    )
    assert written(tmp_path) - collected(tmp_path) == {"tests/unseen_test_file.py::test_promise"}


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


ABSENT = ("datasets", "wandb", "deepspeed", "gguf")
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
