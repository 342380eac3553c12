#!/usr/bin/env python
"""Draw mutations of one line from a seed, and run the tests that cover them.

    python scripts/mutate.py                               # print the draw
    python scripts/mutate.py --run                         # run the test files that name the module
    python scripts/mutate.py --run --coverage .coverage    # run the tests that execute the line, the nearest 60

The last form needs pytest-cov, and before it a run of
``pytest --cov=mtp_train --cov=mtp_inference --cov-context=test`` on the same tests.

A mutation changes an operator, constant, bound, condition, call or argument, or removes a statement. Text is left
alone: strings, messages, the arguments of errors, annotations, decorators and ``__repr__``. ``--run`` works in a copy
of the repository. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
PACKAGES = (
    "mtp_train/losses",
    "mtp_train/heads",
    "mtp_train/checkpoints",
    "mtp_train/acceptance",
    "inference/mtp_inference",
)
# The lossless rule has a table of planted faults of its own, in tests/parity/test_lossless_rule.py.
LEFT_OUT = "inference/mtp_inference/lossless.py"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache")

# An operator, and those that replace it.
OPERATORS = """
    Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, In NotIn, NotIn In,
    Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Mult, Mod FloorDiv, Pow Mult, BitAnd BitOr, BitOr BitAnd,
    And Or, Or And
"""
REPLACED_BY = {name: others for name, *others in map(str.split, OPERATORS.split(","))}
CALLS = """
    min max, any all, amin amax, argmin argmax, minimum maximum, zeros ones, zeros_like ones_like, add_ sub_, mul_ div_,
    softmax log_softmax, exp log, sum mean, ceil floor, sqrt square, sorted list, startswith endswith
"""
OPPOSITE = {one: other for one, other in map(str.split, CALLS.split(","))}
OPPOSITE |= {other: one for one, other in OPPOSITE.items()}
# The order of their arguments has no effect, or the other one always raises.
UNORDERED = {"min", "max", "isinstance", "cast", "getattr", "setattr"}
TESTS, TIME_LIMIT_S = 60, 240


class Mutation(NamedTuple):
    """A line of a file before and after."""

    path: str
    line: int
    before: str
    after: str


def called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def operators(operator: ast.AST) -> list[ast.AST]:
    """Return the operators that replace one."""
    return [getattr(ast, name)() for name in REPLACED_BY.get(type(operator).__name__, ())]


def of_call(call: ast.Call) -> Iterator[ast.AST]:
    """Return a call of the opposite function, without one keyword, and with two arguments swapped."""
    name, arguments = called(call), call.args
    # Without a module before it, `mean` is not defined.
    if name in OPPOSITE and ast.unparse(call.func) != "sum":
        yield changed(call, func=ast.Name(ast.unparse(call.func).removesuffix(name) + OPPOSITE[name]))
    for keyword in call.keywords:
        if keyword.arg is not None and not is_text(keyword.value):
            yield changed(call, keywords=[other for other in call.keywords if other is not keyword])
    if len(arguments) > 1 and name not in UNORDERED:
        yield changed(call, args=[arguments[1], arguments[0], *arguments[2:]])


def of_operation(node: ast.AST) -> Iterator[ast.AST]:
    """Return an arithmetic or boolean operation with another operator, or without an operand."""
    for other in operators(node.op):
        yield changed(node, op=other)
    if isinstance(node, ast.BoolOp):
        for left_out in node.values:
            kept = [value for value in node.values if value is not left_out]
            yield kept[0] if len(kept) == 1 else changed(node, values=kept)
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def of_expression(node: ast.AST) -> Iterator[ast.AST]:
    """Return what replaces a comparison, operation, call, number, truth value or slice."""
    if isinstance(node, ast.Compare):
        yield from (changed(node, ops=[other, *node.ops[1:]]) for other in operators(node.ops[0]))
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp):
        yield from of_operation(node)
    elif isinstance(node, ast.Call):
        yield from of_call(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
        if node.value:
            yield ast.UnaryOp(ast.USub(), node)
    elif isinstance(node, ast.Slice):
        for bound, shift in (("lower", ast.Add()), ("upper", ast.Sub())):
            if (value := getattr(node, bound)) is not None:
                yield changed(node, **{bound: None})
                yield changed(node, **{bound: ast.BinOp(value, shift, ast.Constant(1))})


def mutants(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Return pairs of a node (this one or one below it) and what replaces it."""
    yield from ((node, other) for other in of_expression(node))
    # Conditions are negated, unless they are operations, which have mutations of their own.
    for test in node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield test, ast.UnaryOp(ast.Not(), test)
    if isinstance(node, ast.AugAssign):
        yield from ((node, changed(node, op=other)) for other in operators(node.op))
    effects = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if effects or isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break):
        yield node, ast.Pass()
    if isinstance(node, ast.FunctionDef):
        # The last statement of a function is no early return.
        for inner in (inner for statement in node.body[:-1] for inner in ast.walk(statement)):
            if isinstance(inner, ast.Return):
                yield inner, ast.Pass()


def is_text(node: ast.AST) -> bool:
    """Tell strings, choices and sums of strings, and calls that make messages or errors."""
    if isinstance(node, ast.Call):
        return called(node).endswith(("Error", "Warning", "print", "hint"))
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, ast.IfExp):
        return is_text(node.body) or is_text(node.orelse)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Return a node and those below it, but for text, annotations, decorators and what only type checkers read."""
    statement_of_text = isinstance(node, ast.Expr | ast.AugAssign) and is_text(node.value)
    for_type_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    if is_text(node) or statement_of_text or for_type_checkers or getattr(node, "name", "") == "__repr__":
        return
    yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from code(child)


def sites(path: Path) -> dict[int, list[Mutation]]:
    """Return the mutations of each line of a file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = collections.defaultdict(list)
    for node in code(ast.parse(source)):
        for old, new in mutants(node):
            if old.lineno == old.end_lineno:
                before = lines[old.lineno - 1]
                text = ast.unparse(ast.fix_missing_locations(new))
                # What replaces an operand may bind less tightly.
                if isinstance(new, ast.BinOp | ast.BoolOp | ast.IfExp) or isinstance(old, ast.UnaryOp):
                    text = f"({text})"
                columns = before.encode()
                after = columns[: old.col_offset] + text.encode() + columns[old.end_col_offset :]
                name = path.relative_to(REPOSITORY).as_posix()
                found[old.lineno].append(Mutation(name, old.lineno, before, after.decode()))
    return found


def draw(count: int, seed: int) -> list[Mutation]:
    """Draw mutations evenly over the packages, at most one of each line."""
    drawn = []
    for package in PACKAGES:
        files = [file for file in sorted((REPOSITORY / package).rglob("*.py")) if not file.match(LEFT_OUT)]
        places = [options for file in files for _, options in sorted(sites(file).items())]
        # A generator for each package: its draw does not depend on the packages beside it.
        generator = random.Random(f"{seed}:{package}")
        chosen = generator.sample(places, count // len(PACKAGES))
        drawn += sorted((generator.choice(options) for options in chosen), key=lambda one: (one.path, one.line))
    return drawn


def covering(mutation: Mutation, database: Path) -> list[str]:
    """Return the tests that execute a line, by coverage's contexts: of the module's test file, then the narrowest."""
    query = """select path, context, numbits from line_bits
        join file on file.id = file_id join context on context.id = context_id where context != ''"""
    sizes: collections.Counter[str] = collections.Counter()
    found, shared = set(), set()
    with sqlite3.connect(database) as connection:
        for path, context, bits in connection.execute(query):
            test, _, phase = context.rpartition("|")
            lines = int.from_bytes(bits, "little")
            sizes[test] += lines.bit_count()
            if path.endswith(f"/{mutation.path}") and lines >> mutation.line & 1:
                found.add(test)
                # The first test that needs a shared fixture sets it up for all tests of the file.
                if phase == "setup":
                    shared.add(test.partition("::")[0])
    found.update(test for test in sizes if test.partition("::")[0] in shared)
    module = Path(mutation.path).stem
    return sorted(found, key=lambda test: (module not in test.partition("::")[0], sizes[test], test))


def importing(mutation: Mutation) -> list[str]:
    """Return the files of unit tests that name a module."""
    module = mutation.path.removeprefix("inference/").removesuffix(".py").replace("/", ".")
    files = (file for file in sorted(REPOSITORY.glob("tests/unit/test_*.py")) if module in file.read_text("utf-8"))
    return [str(file.relative_to(REPOSITORY)) for file in files]


def failure(tree: Path, tests: list[str]) -> str | None:
    """Return the first test that fails in a tree, or None."""
    command = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
    try:
        done = subprocess.run([*command, *tests], cwd=tree, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "time limit"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    # 5: no test was left to run.
    return failed[1] if failed else f"exit code {done.returncode}" if done.returncode not in (0, 5) else None


def verdict(tree: Path, mutation: Mutation, coverage: Path | None) -> tuple[str, str | None]:
    """Apply a mutation in a copy of the repository, and return what its tests find and the test that fails."""
    tests = covering(mutation, coverage) if coverage else []
    # Lines of a module's top level run before any test.
    if not (tests := (tests or importing(mutation))[:TESTS]):
        return "no test", None
    file = tree / mutation.path
    lines = file.read_text(encoding="utf-8").splitlines()
    mutated = [*lines[: mutation.line - 1], mutation.after, *lines[mutation.line :]]
    file.write_text("\n".join(mutated) + "\n", encoding="utf-8")
    test = failure(tree, tests)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if test is None:
        return "survived", None
    # A test that fails without the mutation too has not noticed it.
    return ("killed" if test == "time limit" or failure(tree, [test]) is None else "broken test"), test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=48)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--coverage", type=Path)
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(shutil.copytree(REPOSITORY, Path(directory) / "tree", ignore=NOT_COPIED))
        for mutation in draw(options.count, options.seed):
            found, test = verdict(tree, mutation, options.coverage) if options.run else ("not run", None)
            change = f"{mutation.before.strip()}  ->  {mutation.after.strip()}"
            print(f"{mutation.path}:{mutation.line}: {change}: {found} {test}")
            records.append({**mutation._asdict(), "verdict": found, "test": test})
    print(json.dumps(records))


if __name__ == "__main__":
    main()
