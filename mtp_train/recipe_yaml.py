"""YAML text and ``section.field=value`` overrides to plain values, with every slip located.

Plain scalars are read as YAML 1.2 has them: ``1e-4`` is a number; ``off``, ``no`` and ``12:30`` are text. PyYAML by
itself reads them as text, as false, as false and as 750 (YAML 1.1).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from mtp_train.errors import RecipeError
from mtp_train.recipe_hints import dotted, shown

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(r"(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan)\Z", re.IGNORECASE)
_DIGITS = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """Read the scalars of YAML 1.2, and note keys that are given twice."""

    # Empty, so that what SafeLoader inherits from YAML 1.1 is left behind.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where
        self.repeated_keys: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a dictionary; by itself the base class lets the last of equal keys win."""
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first_lines:
                self.repeated_keys.append(
                    f"{self.where}, line {line}: {key.value!r} once more (first in line {first_lines[key.value]}); "
                    "expected each field once. Remove one of them."
                )
            first_lines.setdefault(key.value, line)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quote what YAML 1.1 or 1.2 would not read back as the same text."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their field."""
        super().increase_indent(flow, False)


for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, _DIGITS),
    ("float", _FLOAT, _DIGITS),
):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, _DIGITS)


def parse_yaml(text: str, where: str) -> tuple[Any, list[str]]:
    """Return the value of a YAML document, and one problem for each key that is given twice.

    Args:
        text: The document.
        where: What to call it in messages.

    Raises:
        RecipeError: It is not YAML; the message has line and column.
    """
    try:
        loader = _Loader(text, where)
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        found = " ".join(part for part in (error.context, error.problem) if part)
        raise _unreadable(place, found) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        place = f"{where}, line {line}, column {column}"
        raise _unreadable(place, f"the control character U+{error.character:04X}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        raise _unreadable(where, str(error)) from error
    return value, loader.repeated_keys


def dump_yaml(value: object) -> str:
    """Write plain values as YAML that :func:`parse_yaml`, and any reader of YAML 1.1, reads back the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def apply_override(data: dict[Any, Any], override: str) -> list[str]:
    """Set one value in a recipe's plain data, in place; return the problems, in which case nothing is set.

    Args:
        data: The recipe. Sections it lacks are added; a list's items are addressed by number.
        override: ``section.field=value``, the value in YAML. A list is replaced as a whole.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        return [
            f"override {override!r}: no field with a value; expected section.field=value. For example: train.lr=1.0e-3."
        ]
    try:
        value, problems = parse_yaml(text, f"override {path}")
    except RecipeError as error:
        return error.problems
    return problems or _set(data, path.split("."), value)


def _set(node: object, parts: list[str], value: object, done: str = "") -> list[str]:
    part, rest = parts[0], parts[1:]
    at = dotted(done, part)
    key: Any
    if isinstance(node, list) and part.isdecimal():
        key = int(part)
        if key >= len(node):
            return [f"{at}: beyond the list, which has {len(node)}; expected an item of it. Give {done} as a whole."]
        child = node[key]
    elif isinstance(node, dict) and not part.isdecimal():
        key, child = part, node.get(part)
    else:
        kind = "list" if part.isdecimal() else "section"
        whole = done or "the recipe"
        return [f"{at}: {whole} is {shown(node)}; expected a {kind}. Give {whole} as a whole."]
    if rest and child is None and not rest[0].isdecimal():
        child = node[key] = {}
    if rest:
        return _set(child, rest, value, at)
    node[key] = value
    return []


def _unreadable(where: str, found: str) -> RecipeError:
    return RecipeError([f"{where}: {found}; expected well-formed YAML. Mind indentation, colons, brackets and quotes."])
