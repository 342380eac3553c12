"""Build the chat task: "Describe mod.Cls.fn(self, a)", answered by a JSON record from the function's syntax tree.

Parts of a record are copies of the prompt (name, arguments, defaults), parts are predictable (exceptions, whether it
returns), others are not (length, docstring). So a tiny model learns the task well, and its output has entropy.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from demo_maker.corpus import SourceFile

MAX_DOC_CHARS = 56
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Described:
    """A function with its question and answer."""

    group: str
    prompt: str
    answer: str
    doc: str | None

    def messages(self) -> list[dict[str, str]]:
        """Return the exchange as chat messages."""
        return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]


def described_functions(file: SourceFile) -> list[Described]:
    """Describe the functions and methods of a file, without nested functions and repeated questions."""
    with warnings.catch_warnings():
        # The compiler warns about string escapes in old modules.
        warnings.simplefilter("ignore")
        tree = ast.parse(file.text)
    found: dict[str, Described] = {}
    for owner, node in _functions(tree, ()):
        described = _describe(file, owner, node)
        found.setdefault(described.prompt, described)
    return list(found.values())


def _functions(node: ast.AST, owner: tuple[str, ...]) -> Iterator[tuple[str | None, FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield ".".join(owner) or None, child
        else:
            yield from _functions(child, (*owner, child.name) if isinstance(child, ast.ClassDef) else owner)


def _describe(file: SourceFile, owner: str | None, node: FunctionNode) -> Described:
    arguments = _signature(node.args)
    doc = _first_line(ast.get_docstring(node))
    record = {
        "name": node.name,
        "module": file.module,
        "class": owner,
        "args": [text.split("=")[0] for text in arguments],
        "defaults": dict(text.split("=", 1) for text in arguments if "=" in text),
        "returns": any(isinstance(inner, ast.Return) and inner.value is not None for inner in _own_nodes(node)),
        "raises": _raised(node),
        "lines": (node.end_lineno or node.lineno) - node.lineno + 1,
        "doc": doc,
    }
    qualified = ".".join(part for part in (file.module, owner, node.name) if part)
    prompt = f"Describe {qualified}({', '.join(arguments)})"
    return Described(file.top, prompt, json.dumps(record, ensure_ascii=False), doc)


def _signature(arguments: ast.arguments) -> list[str]:
    """Return the arguments without annotations, as ``name`` or ``name=default``, with their stars."""
    positional = [*arguments.posonlyargs, *arguments.args]
    given = [ast.unparse(value) for value in arguments.defaults]
    defaults = [None] * (len(positional) - len(given)) + given
    parts = [_with_default(one.arg, value) for one, value in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(_with_default(one.arg, ast.unparse(value) if value is not None else None))
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return parts


def _with_default(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without the bodies of nested functions and classes."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, FunctionNode | ast.ClassDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _raised(function: ast.AST) -> list[str]:
    """Return the names of the first three exceptions that a function raises, without repeats."""
    names: list[str] = []
    for node in _own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(target).split(".")[-1]
            if name.isidentifier() and name not in names:
                names.append(name)
    return names[:3]


def _first_line(docstring: str | None) -> str | None:
    """Return the first line of a docstring; a long one is cut between words."""
    first = (docstring or "").strip().split("\n")[0].strip()
    if len(first) > MAX_DOC_CHARS:
        first = first[:MAX_DOC_CHARS].rsplit(" ", 1)[0]
    return first or None
