"""The house rules that a program can see. Each check is shown able to fail by the case beside it."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DIRECTORIES = ("mtp_train", "inference", "recipes", "scripts", "tests", ".ci")
TEXT = {".py", ".md", ".yaml", ".toml", ".sh", ".html", ".ipynb", ""}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 700, 60
# Lines without blanks. A change that needs more first removes a concept; one that removes some lowers its number.
CEILINGS = {
    ("mtp_train", "inference/mtp_inference"): 30_000,
    ("tests",): 28_000,
    ("scripts", "inference/benchmarks"): 5_000,
}

# Joined here, so that this file does not hold what it looks for.
TOPS = "|".join(("home", "root", "work", "tmp", "mnt", "Users", "private"))
MACHINE_PATH = re.compile(rf"(?<![\w.])/(?:{TOPS})/\w")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
ASSERTING = {"assert", "raises", "warns", "check", "expect", "verify", "fail"}
UNSAFE_LOADERS = {"torch.load", "pickle.load", "pickle.loads", "yaml.load"}

Check = Callable[[str], Iterator[str]]


@functools.lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """Parse a file once for all checks, which run file by file: the trees of all files take hundreds of megabytes."""
    return ast.parse(source)


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@functools.lru_cache(maxsize=1)
def comments(source: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def long_files(source: str) -> Iterator[str]:
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{lines} lines; at most {MAX_FILE_LINES}"


def long_functions(source: str) -> Iterator[str]:
    for function in functions(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{function.lineno}: {function.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"


def unfinished_work(source: str) -> Iterator[str]:
    for line, comment in comments(source):
        if UNFINISHED.search(comment):
            yield f"{line}: {comment}"


def foreign_letters(source: str) -> Iterator[str]:
    for line, comment in comments(source):
        if not comment.isascii():
            yield f"{line}: a comment is not ASCII: {comment}"


def idle_tests(source: str) -> Iterator[str]:
    for function in functions(source):
        if not function.name.startswith("test_"):
            continue
        words = {word for name in calls(function) for word in re.split(r"[._]", name)}
        if not words & ASSERTING and not any(isinstance(node, ast.Assert) for node in ast.walk(function)):
            yield f"{function.lineno}: {function.name} asserts nothing"


def swallowed_errors(source: str) -> Iterator[str]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
            yield f"{node.lineno}: an exception is swallowed"


def unsafe_loaders(source: str) -> Iterator[str]:
    for name in calls(parsed(source)):
        if name in UNSAFE_LOADERS:
            yield f"{name} runs what it reads"


def machine_paths(source: str) -> Iterator[str]:
    for number, line in enumerate(source.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"{number}: names a path of one machine: {line.strip()}"


PYTHON_CHECKS: tuple[Check, ...] = (
    long_files,
    long_functions,
    unfinished_work,
    foreign_letters,
    idle_tests,
    swallowed_errors,
    unsafe_loaders,
)


def text_files() -> list[Path]:
    """Return the files people read, from the top level and the directories of the layout."""
    files = [path for path in REPOSITORY.iterdir() if path.is_file() and path.suffix in {".md", ".toml"}]
    for directory in DIRECTORIES:
        files += [path for path in (REPOSITORY / directory).rglob("*") if path.is_file() and path.suffix in TEXT]
    return sorted(path for path in files if "__pycache__" not in path.parts)


def findings(checks: tuple[Check, ...], files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(REPOSITORY)}: {check.__name__}: {finding}"
        for path in files
        for source in [path.read_text(encoding="utf-8")]
        for check in checks
        for finding in check(source)
    ]


def test_no_python_file_breaks_a_rule() -> None:
    files = [path for path in text_files() if path.suffix == ".py"]
    assert len(files) > 20
    assert findings(PYTHON_CHECKS, files) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert findings((machine_paths,), text_files()) == []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (long_files, "x = 1\n" * (MAX_FILE_LINES + 1)),
        (long_functions, "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (unfinished_work, "x = 1  # TO" + "DO: finish\n"),
        (foreign_letters, "x = 1  # \N{EM DASH}\n"),
        (idle_tests, "def test_nothing():\n    checkpoint()\n"),
        (swallowed_errors, "try:\n    x = 1\nexcept OSError:\n    pass\n"),
        (unsafe_loaders, "import torch\ntorch.load('x')\n"),
        (machine_paths, "path = '/ho" + "me/someone/model'\n"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_rule_is_found(check: Check, source: str) -> None:
    assert len(list(check(source))) == 1


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (long_files, "x = 1\n" * MAX_FILE_LINES),
        (long_functions, "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
        (idle_tests, "def test_refusal():\n    with pytest.raises(ValueError, match='x'):\n        f()\n"),
        (idle_tests, "def test_near():\n    torch.testing.assert_close(a, b)\n"),
        (unsafe_loaders, "yaml.safe_load('x')\n"),
        (machine_paths, "#!/usr/bin/env bash\nsee https://example.org/home/page and runs/tmp/x\n"),
    ],
)
def test_a_kept_rule_passes(check: Check, source: str) -> None:
    assert list(check(source)) == []


def lines_of(directories: tuple[str, ...]) -> int:
    """Return the lines without blanks of the Python files below some directories."""
    files = (path for name in directories for path in (REPOSITORY / name).rglob("*.py"))
    return sum(bool(line.strip()) for path in files for line in path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("directories", CEILINGS, ids=" ".join)
def test_the_project_does_not_grow(directories: tuple[str, ...]) -> None:
    # Not far below either, or the ceiling no longer holds anything.
    assert 0.97 * CEILINGS[directories] <= lines_of(directories) <= CEILINGS[directories]
