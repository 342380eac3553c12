"""Read, check and write recipes; word each problem for the person who wrote one: path, found, expected, a hint."""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mtp_train.errors import RecipeError
from mtp_train.recipe.json_schema import (
    Node,
    describe,
    dotted,
    held_section,
    not_null,
    schema_tree,
    shown,
    shown_default,
    walk_fields,
)
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import AUTO, CONTRADICTION
from mtp_train.recipe.shipped import recipe_names, recipe_path

Loc = tuple[int | str, ...]
RecipeLike = Recipe | str | Path | Mapping[str, Any]
STAND_INS: Mapping[str, int | float | None] = {
    "data.regenerate.max_prompts": 1,
    "data.regenerate.max_new_tokens": 1,
    "data.regenerate.batch_size": None,
    "data.seq_len_tokens": 512,
    "data.holdout": 0.05,
    "train.max_steps": 1,
    "train.tokens_per_step": 512,
    "train.lr": 1e-4,
    "train.micro_batch_sequences": 1,
    "train.warmup_steps": 0,
    "evaluate.prompts": 1,
}
"""Every field that may be ``auto`` and that ``runs/resolve.py`` resolves, with a value that stands in for it while the
rest is read. Other fields with ``auto``, such as ``train.precision``, are resolved by their own stage."""
_OF_A_MICRO_BATCH = ("data.seq_len_tokens", "train.micro_batch_sequences")
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(r"(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.?[0-9]*)(?:[eE][-+]?[0-9]+)?|\.inf)|\.nan)\Z", re.IGNORECASE)
_DIGITS = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """Read the scalars of YAML 1.2, and collect keys that occur twice in a mapping."""

    # Empty, so that the YAML 1.1 resolvers of SafeLoader are not inherited.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where
        self.repeated_keys: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a dictionary, and collect repeated keys: the base class would silently take the last one."""
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first_lines:
                self.repeated_keys.append(
                    f"{self.where}, line {line}: {key.value!r} again (first in line {first_lines[key.value]}); "
                    "expected each field once. Remove one of them."
                )
            first_lines.setdefault(key.value, line)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quote text that YAML 1.1 or 1.2 would read back as another value."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent the items of a list below its field."""
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
    """Return the value of a YAML document, named ``where`` in messages, and one problem for each repeated key."""
    try:
        loader = _Loader(text, where)
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else f"{where}, line {mark.line + 1}, column {mark.column + 1}"
        found = " ".join(part for part in (error.context, error.problem) if part)
        raise _unparsable(place, found) from error
    except yaml.reader.ReaderError as error:
        *above, line = text[: error.position].split("\n")
        place = f"{where}, line {len(above) + 1}, column {len(line) + 1}"
        raise _unparsable(place, f"the control character U+{error.character:04X}") from error
    # A number of thousands of digits, an escape beyond Unicode, brackets nested without end, !!bool on other text.
    except (ValueError, OverflowError, RecursionError, LookupError) as error:
        raise _unparsable(where, str(error)) from error
    return value, loader.repeated_keys


def dump_yaml(value: object) -> str:
    """Return plain values as YAML that :func:`parse_yaml` and every YAML 1.1 reader read back as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def apply_override(data: dict[Any, Any], override: str) -> list[str]:
    """Set one value of ``section.field=value`` in the plain data of a recipe; return the problems, with which nothing
    is set.
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
            return [f"{at}: past the end of a list of {len(node)}; expected one of its items. Set {done} as a whole."]
        child = node[key]
    elif isinstance(node, dict) and not part.isdecimal():
        key, child = part, node.get(part)
    else:
        kind = "list" if part.isdecimal() else "section"
        whole = done or "the recipe"
        return [f"{at}: {whole} is {shown(node)}; expected a {kind}. Set {whole} as a whole."]
    if rest and child is None and not rest[0].isdecimal():
        child = node[key] = {}
    if rest:
        return _set(child, rest, value, at)
    node[key] = value
    return []


def _unparsable(where: str, found: str) -> RecipeError:
    return RecipeError(f"{where}: {found}; expected well-formed YAML. Check indentation, colons, brackets and quotes.")


def load_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> Recipe:
    """Return the checked recipe of a file, a name, plain values or a recipe; an error lists all problems."""
    return validated(*plain_recipe(recipe, overrides))


def plain_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> tuple[Any, list[str]]:
    """Return the plain values of a recipe with the overrides in them, and the problems of reading them."""
    problems: list[str] = []
    if isinstance(recipe, Recipe):
        data: Any = recipe.model_dump(mode="json")
    elif isinstance(recipe, Mapping):
        data = copy.deepcopy(dict(recipe))
    else:
        path = recipe_path(recipe)
        data, problems = parse_yaml(_read(path), str(path))
        data = {} if data is None else data
    if isinstance(data, dict):
        for override in overrides:
            problems += apply_override(data, override)
    return data, problems


def validated(data: object, problems: Sequence[str] = ()) -> Recipe:
    """Return the recipe of plain values; an error lists all problems, those given first."""
    found = list(problems)
    try:
        # Strict in JSON's types: a list is a tuple, a whole number a float. Other objects of YAML are text.
        recipe = Recipe.model_validate_json(json.dumps(data, default=str))
    except ValidationError as invalid:
        found += problems_of(data, invalid)
    except (ValueError, TypeError) as error:
        found.append(f"recipe: {error}; expected plain values. Write aliases and keys out as text.")
    if found:
        raise RecipeError(*found)
    return recipe


def with_stand_ins(data: object, problems: Sequence[str] = ()) -> Recipe:
    """Return the recipe of plain values with a stand-in for every field that is ``auto``."""
    values = {field: one for field, one in STAND_INS.items() if value_of(data, field) == AUTO}
    if "train.tokens_per_step" in values:
        # A whole micro-batch, as the recipe's rules ask for; wrong values are reported as such.
        sizes = {field: values.get(field) or value_of(data, field) for field in _OF_A_MICRO_BATCH}
        counted = [one if isinstance(one, int) and one > 0 else STAND_INS[field] for field, one in sizes.items()]
        values["train.tokens_per_step"] = math.prod(filter(None, counted))
    return validated(with_values(data, values), problems)


def value_of(data: Any, field: str) -> Any:
    """Return the value of a field such as ``train.lr`` in a recipe's plain values; None if it is not set."""
    for part in field.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def with_values(data: object, values: Mapping[str, Any]) -> Any:
    """Return a copy of a recipe's plain values with some fields, which it contains, replaced."""
    changed: Any = copy.deepcopy(data)
    for field, value in values.items():
        *parents, name = field.split(".")
        reduce(getitem, parents, changed)[name] = value
    return changed


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML with every field; reading it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: Path) -> str:
    expected, hint = "a recipe in YAML", "Check the path and its permissions."
    try:
        # Opening a FIFO waits for a writer, and reading a device may never end.
        if path.is_file() or path.is_dir() or not path.exists():
            return path.read_text(encoding="utf-8")
        found = "not a regular file"
    except FileNotFoundError:
        found, siblings = "no such file", [str(file) for file in path.parent.glob("*.yaml")]
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


def problems_of(data: object, invalid: ValidationError) -> list[str]:
    """Return one line per problem with a recipe's plain values, ``"{path}: {found}; expected {rule}. {hint}"``."""
    # Unknown keys first: a misspelt key is often the cause of a missing field.
    errors = sorted(invalid.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    return [problem for error in errors for problem in _worded(data, error["type"], error["loc"], error.get("ctx"))]


def _worded(data: object, kind: str, loc: Loc, context: dict[str, Any] | None) -> Iterator[str]:
    if kind == CONTRADICTION and context is not None:
        path = _locate(data, loc)[0]
        yield from (dotted(path, problem) for problem in context["problems"])
    elif kind == "extra_forbidden":
        yield _unknown(data, loc)
    elif kind == "missing":
        yield from _missing(data, loc)
    else:
        path, value, node, default = _locate(data, loc)
        length = len(value) if isinstance(value, list) else 1
        # pydantic counts only valid items: it also calls a list with wrong items too short.
        if kind == "too_short" and length >= not_null(node)["minItems"]:
            return
        yield f"{path or 'recipe'}: {shown(value)}; expected {_expected(node)}. {_hint(path, value, node, default)}"


def _locate(data: Any, loc: Loc) -> tuple[str, Any, Node, str | None]:
    """Return the path, the value, the schema node and the default (None: there is none) at a location of pydantic."""
    path, node, default = "", schema_tree(), None
    for step in loc:
        node = not_null(node)
        if isinstance(step, str):
            is_required = step in node.get("required", ())
            node, data = node["properties"][step], data.get(step) if isinstance(data, dict) else None
            default = None if is_required else shown_default(node)
        else:
            node = node["items"]
            if not isinstance(data, list | tuple):  # one item in place of a list
                continue
            data, default = data[step], None
        path = dotted(path, step)
    return path, data, node, default


def _expected(node: Node) -> str:
    inner = not_null(node)
    return f"a section with the fields {', '.join(inner['properties'])}" if "properties" in inner else describe(node)


def _hint(path: str, value: object, node: Node, default: str | None) -> str:
    inner = not_null(node)
    if near := difflib.get_close_matches("none" if value is None else str(value), inner.get("enum", ()), n=1):
        return f"Did you mean {near[0]}?"
    if "items" in inner and isinstance(value, str) and held_section(inner)[0] is None:
        return f"Write {path}: [{value}]."
    if inner.get("type") == "string" and isinstance(value, bool | int | float):
        return f"Put it in quotes: {str(value)!r}."
    return "Correct it; there is no default." if default is None else f"Correct it, or leave it out for {default}."


def _missing(data: object, loc: Loc) -> Iterator[str]:
    """Yield the problem of a missing field, or of each required field of a missing section."""
    path, _, node, _ = _locate(data, loc)
    if "properties" not in node:
        yield f"{path}: missing; expected {describe(node)}. Add it."
    for name in node.get("required", ()):
        yield from _missing(data, (*loc, name))


def _unknown(data: object, loc: Loc) -> str:
    (path, _, node, _), key = _locate(data, loc[:-1]), str(loc[-1])
    names, paths = list(not_null(node)["properties"]), [path for path, _ in walk_fields(schema_tree())]
    near = [dotted(path, name) for name in difflib.get_close_matches(key, names, n=1)]
    meant = [path for path in paths if path.endswith(f".{key}")] or near or _elsewhere(key, paths)
    expected = f"a field of {path or 'the recipe'}" if meant else f"one of {', '.join(names)}"
    hint = f"Did you mean {' or '.join(meant)}?" if meant else "Remove it."
    return f"{dotted(path, key)}: unknown; expected {expected}. {hint}"


def _elsewhere(key: str, paths: list[str]) -> list[str]:
    """Return the path of the field, in any section, whose name is most similar to ``key``."""
    names = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    return [names[name] for name in difflib.get_close_matches(key, names, n=1, cutoff=0.75)]
