"""Every text of the product that proposes a command or a change of a recipe, read from its source.

A text is named as its source writes it, with {} for values: of an error message only its hint.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mtp_inference
import mtp_train
from mtp_train.cli.main import EXAMPLES
from mtp_train.recipe.schema import Recipe

SECTIONS = "|".join(name for name in Recipe.model_fields if name not in ("run_dir", "seed"))
COMMAND = re.compile(
    rf"mtp-train (?:{'|'.join(EXAMPLES)}) (?:\{{\}}|'|--|[A-Z]{{3,}})|hf (?:down|up)load |pip install |\bsed\b"
)
PROGRAMS = ("mtp-train", "hf", "pip", "sed")
FLAG = re.compile(r"(?:\b[Aa]dd|\b[Uu]se|\bby|\bas|,|:|or) --[a-z][a-z-]+")
CHANGE = re.compile(
    rf"(?:\b(?:{SECTIONS})\.[a-z_0-9.]+|(?<=[Ww]rite )\{{\}}|(?:Add )?\{{\}}(?:\.\w+)+)(?:=|: )[^\s,;]+",
)


def proposals() -> set[str]:
    """Return the sentences and lines that propose something to paste."""
    found = set[str]()
    for package in (mtp_train, mtp_inference):
        directory = Path(str(package.__file__)).parent
        for file in sorted(directory.rglob("*.py")):
            if file.parent.name != "cli":
                for text in _texts(ast.parse(file.read_text(encoding="utf-8"))):
                    found.update(_proposals_of(text))
    return found


def _proposals_of(text: str) -> Iterator[str]:
    _, expected, rest = text.rpartition("; expected ")
    hint = rest.partition(". ")[2] if expected else rest
    for part in re.split(r"(?<=\S\.) |\n+", hint):
        # A text that begins with a field tells what was found there.
        is_change = any(match.start() or expected or match[0][-1] != " " for match in CHANGE.finditer(part))
        if COMMAND.search(part) or is_change or (expected and FLAG.search(part)):
            yield part


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module but its docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            for part in node.values:
                yield from _texts(part) if isinstance(part, ast.FormattedValue) else ()
        elif parts := _command(node):
            # The words of a command, which shlex joins; those of another list, if any, join the one before them.
            yield " ".join(map(_word, parts)).replace(" *{}", "{}")
            for one in parts[1:]:
                yield from _texts(one)
        elif isinstance(node, ast.Constant):
            yield from [node.value] if isinstance(node.value, str) else []
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from _texts(node)


def _command(node: ast.AST) -> list[ast.expr]:
    """Return the words of a list that begins with a program, or of a call that puts ours before them."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("command", "suggestions.command"):
        return [ast.Constant("mtp-train"), *node.args]
    return node.elts if isinstance(node, ast.List) and node.elts and _word(node.elts[0]) in PROGRAMS else []


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Starred):
        return "*{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


PASTED: list[str] = []
"""What the test that runs has pasted: commands, and messages whose changes were added."""
COVERED: set[str] = set()
"""The proposals that tests paste."""


def pastes(*proposed: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the proposals that a test pastes, and check after it that it did."""
    COVERED.update(proposed)

    def declared(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> None:
            PASTED.clear()
            test(*args, **kwargs)
            for one in proposed:
                assert any(made_of(one, text) for text in PASTED), f"not pasted: {one}"

        return checked

    return declared


def made_of(proposal: str, text: str) -> bool:
    """Return whether a text contains a proposal, with values in it."""
    return re.search(re.escape(proposal).replace(r"\{\}", "(?:.|\n)*"), text) is not None


def changes_of(text: str) -> list[str]:
    """Return the changes of a recipe that a message proposes first, as words of a command line."""
    quoted = re.compile(rf"'((?:{SECTIONS})\.[^']*)'")
    plain = re.compile(rf"(?<![.\w'])((?:{SECTIONS})\.[\w.]+)(=|: )(\[[^\]]*\]|\{{\}}|[^\s,;]+)")
    for part in re.split(r"[,;]? or ", text.rpartition("; expected ")[2].partition(". ")[2]):
        found = [f"{field}={value.rstrip('.:')}" for field, _, value in plain.findall(part)]
        if words := quoted.findall(part) or found:
            return words
    return []


if __name__ == "__main__":
    print(*map(repr, sorted(proposals())), sep="\n")
