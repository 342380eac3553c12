"""Read, check and write recipes; word each problem for the person who wrote one: path, found, expected, a hint."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mtp_train.errors import RecipeError, one_line
from mtp_train.recipe.json_schema import dotted, sections, shown
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import CONTRADICTION
from mtp_train.recipe.shipped import recipe_names, recipe_path

RecipeLike = Recipe | str | Path | Mapping[str, Any]
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(r"(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan)\Z", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Read the scalars of YAML 1.2, and refuse keys that occur twice in a mapping."""

    # Empty, so that the YAML 1.1 resolvers of SafeLoader are not inherited.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a dictionary; the base class would silently take the last of two equal keys.

        Raises:
            RecipeError: A key occurs twice.
        """
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first_lines:
                raise RecipeError(
                    f"{self.name}, line {line}: {key.value!r} again (first in line {first_lines[key.value]}); expected "
                    "each field once. Remove one of them."
                )
            first_lines[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quote text that YAML 1.1 or 1.2 would read back as another value."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the items of a list below its field."""
        super().increase_indent(flow, False)


for _name, _pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, None)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML document, named ``where`` in messages.

    Raises:
        RecipeError: It is not well-formed, or a key occurs twice.
    """
    try:
        loader = _Loader(text)
        loader.name = where
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        raise _unparsable(place, " ".join(filter(None, (error.context, error.problem)))) from error
    # A control character, a number of thousands of digits, an escape beyond Unicode, brackets nested without end.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, LookupError) as error:
        raise _unparsable(where, one_line(error)) from error


def dump_yaml(value: object) -> str:
    """Return plain values as YAML that :func:`parse_yaml` and every YAML 1.1 reader read back as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def apply_override(data: dict[Any, Any], override: str) -> None:
    """Set one value of ``section.field=value`` in the plain data of a recipe.

    Raises:
        RecipeError: It is no such text, or does not fit the data, in which nothing is set then.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise RecipeError(
            f"override {override!r}: no field with a value; expected section.field=value. For example: train.lr=1.0e-3."
        )
    _set(data, path.split("."), parse_yaml(text, f"override {path}"))


def _set(node: Any, parts: list[str], value: object, done: str = "") -> None:
    (part, *rest), at_item = parts, parts[0].isdecimal()
    at = dotted(done, part)
    whole = done or "the recipe"
    if not isinstance(node, list if at_item else dict):
        kind = "list" if at_item else "section"
        raise RecipeError(f"{at}: {whole} is {shown(node)}; expected a {kind}. Set {whole} as a whole.")
    if at_item and int(part) >= len(node):
        raise RecipeError(
            f"{at}: past the end of a list of {len(node)}; expected one of its items. Set {done} as a whole."
        )
    key: Any = int(part) if at_item else part
    if not rest:
        node[key] = value
        return
    child = node[key] if at_item or key in node else None
    if child is None and not rest[0].isdecimal():
        child = node[key] = {}
    _set(child, rest, value, at)


def _unparsable(where: str, found: str) -> RecipeError:
    return RecipeError(f"{where}: {found}; expected well-formed YAML. Check indentation, colons, brackets and quotes.")


def load_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> Recipe:
    """Return the checked recipe of a file, a name, plain values or a recipe; an error lists all problems."""
    if isinstance(recipe, Recipe):
        data: Any = recipe.model_dump(mode="json")
    elif isinstance(recipe, Mapping):
        data = copy.deepcopy(dict(recipe))
    else:
        path = recipe_path(recipe)
        data = parse_yaml(_read(path), str(path)) or {}
    problems: list[str] = []
    for override in overrides:
        try:
            apply_override(data, override)
        except RecipeError as error:
            problems += error.problems
    try:
        # Strict in JSON's types: a list is a tuple, a whole number a float. Other objects of YAML are text.
        checked = Recipe.model_validate_json(json.dumps(data, default=str))
    except ValidationError as invalid:
        problems += problems_of(invalid)
    except (ValueError, TypeError) as error:
        problems.append(f"recipe: {error}; expected plain values. Write aliases and keys out as text.")
    if problems:
        raise RecipeError(*problems)
    return checked


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML with every field; reading it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: Path) -> str:
    expected = "a recipe in YAML"
    hint = "Check the path and its permissions."
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        found = "no such file"
        siblings = [str(file) for file in path.parent.glob("*.yaml")]
        near = difflib.get_close_matches(str(path), siblings, n=1)
        if not near:
            expected += f", or the name of one of the package: {', '.join(recipe_names())}"
            near = difflib.get_close_matches(path.stem, recipe_names())
        hint = f"Did you mean {' or '.join(near)}?" if near else "Check the path, or see mtp-train recipes."
    # No text in UTF-8; a path with a NUL or an unpaired surrogate.
    except (OSError, ValueError) as error:
        found = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    shown_path = str(path)[:200].encode("ascii", "backslashreplace").decode()
    raise RecipeError(f"{shown_path}: {found}; expected {expected}. {hint}")


def problems_of(invalid: ValidationError) -> list[str]:
    """Return one line per problem with a recipe, ``"{path}: {found}; expected {rule}. {hint}"``."""
    # Unknown keys first: a misspelt key is often the cause of a missing field.
    errors = sorted(invalid.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    return [problem for error in errors for problem in _worded(error)]


def _worded(error: ErrorDetails) -> Iterator[str]:
    kind = error["type"]
    context = error.get("ctx", {})
    path = reduce(dotted, error["loc"], "")
    if kind == CONTRADICTION:
        yield from (dotted(path, problem) for problem in context["problems"])
    elif kind == "extra_forbidden":
        yield _unknown(path, reduce(dotted, (name for name in error["loc"][:-1] if isinstance(name, str)), ""))
    elif kind == "missing":
        yield f"{path}: missing; expected a value. Add it."
    # pydantic counts only valid items: it also calls a list with wrong items too short.
    elif kind != "too_short" or len(error["input"]) < context["min_length"]:
        expected = re.sub(r"^\w+ should( be| have)?", "expected", error["msg"])
        yield f"{path or 'recipe'}: {shown(error['input'])}; {expected}. Correct it."


def _unknown(path: str, section: str) -> str:
    within, _, key = path.rpartition(".")
    fields = {where: list(one.model_fields) for where, one in sections()}
    near = [dotted(within, name) for name in difflib.get_close_matches(key, fields[section], n=1)]
    meant = [dotted(where, key) for where, names in fields.items() if key in names] or near
    expected = f"a field of {within or 'the recipe'}" if meant else f"one of {', '.join(fields[section])}"
    hint = f"Did you mean {' or '.join(meant)}?" if meant else "Remove it."
    return f"{path}: unknown; expected {expected}. {hint}"
