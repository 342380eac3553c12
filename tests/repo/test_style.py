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

from repository import REPOSITORY

DIRECTORIES = ("mtp_train", "inference", "recipes", "scripts", "tests", ".ci")
TEXT = {".py", ".md", ".yaml", ".toml", ".sh", ".html", ".ipynb", ""}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 700, 60
# Ceilings are in nodes of the syntax tree, not in lines, so that packing code gains nothing. A change that needs more
# first removes a concept; one that removes some lowers its number.
PRODUCT = ("mtp_train", "inference/mtp_inference")
MAX_PRODUCT_NODES = 178_270
MAX_SCRIPT_NODES = 40_885
MAX_TESTS_PER_PRODUCT = 1.354
# The pages that tests/repo/test_readme.py and tests/repo/test_recipes.py compare with their generators.
GENERATED = {"recipes/commands.md", "recipes/families.md", "recipes/fields.md"}
MAX_GENERATED_WORDS = 7_500
MAX_WRITTEN_WORDS = 19_790
MAX_README_WORDS = 800

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


def code_nodes(source: str) -> int:
    """Count the nodes of a file's syntax tree, without docstrings and without the contexts of names.

    Line breaks, comments and redundant brackets are in no syntax tree, so layout does not change the count.
    """
    nodes = [node for node in ast.walk(parsed(source)) if not isinstance(node, ast.expr_context | ast.Module)]
    # A string that stands alone documents a module, a class, a function or an attribute. It has two nodes.
    documented = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in nodes
    )
    return len(nodes) - 2 * documented


def nodes_below(*directories: str) -> int:
    """Return the code nodes of the Python files below some directories."""
    files = [path for name in directories for path in (REPOSITORY / name).rglob("*.py")]
    return sum(code_nodes(path.read_text(encoding="utf-8")) for path in files)


def words_of_pages() -> dict[str, int]:
    """Return the words of each Markdown page, by its path in the repository."""
    pages = [path for path in text_files() if path.suffix == ".md"]
    return {path.relative_to(REPOSITORY).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in pages}


@pytest.mark.parametrize(
    ("source", "nodes"),
    [
        ("", 0),
        ("f(x)\n", 4),
        ("f(\n    # A reason.\n    (x),\n)\n", 4),
        ('"""A module."""\nx = 1\n"""An attribute."""\n', 3),
        ('x = "a text that is used"\n', 3),
        ("a, b = 1, 2\n", 7),
        ("a = 1\nb = 2\n", 6),
    ],
)
def test_code_is_counted_without_its_layout(source: str, nodes: int) -> None:
    assert code_nodes(source) == nodes


def test_the_project_does_not_grow() -> None:
    product = nodes_below(*PRODUCT)
    # Not far below either, or the ceiling no longer holds anything.
    assert 0.97 * MAX_PRODUCT_NODES <= product <= MAX_PRODUCT_NODES
    assert nodes_below("tests") <= MAX_TESTS_PER_PRODUCT * product
    assert nodes_below("scripts", "inference/benchmarks", "inference/conformance") <= MAX_SCRIPT_NODES


def test_the_pages_do_not_grow() -> None:
    words = words_of_pages()
    generated = sum(words[page] for page in GENERATED)
    assert generated <= MAX_GENERATED_WORDS
    assert sum(words.values()) - generated <= MAX_WRITTEN_WORDS
    assert words["README.md"] <= MAX_README_WORDS
