"""Word each error of pydantic for the person who wrote the recipe: path, what was found, what was expected, a hint."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

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
from mtp_train.recipe.sections import CONTRADICTION

Loc = tuple[int | str, ...]


def problems_of(data: object, invalid: ValidationError) -> list[str]:
    """Return one line per problem with a recipe's plain values, ``"{path}: {found}; expected {rule}. {hint}"``."""
    # Unknown keys first: a misspelt key is often the cause of a missing field.
    errors = sorted(invalid.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    worded = [problem for error in errors for problem in _worded(data, error["type"], error["loc"], error.get("ctx"))]
    if isinstance(data, Mapping) and all(error["loc"] for error in errors):
        worded += _between_readable_sections(data, {str(error["loc"][0]) for error in errors})
    return worded


def _between_readable_sections(data: Mapping[str, object], unreadable: Collection[str]) -> Iterator[str]:
    """Yield the contradictions between sections that have no problem of their own."""
    types: dict[str, Any] = {name: field.annotation for name, field in Recipe.model_fields.items()}
    readable = {
        name: TypeAdapter(types[name]).validate_json(json.dumps(data[name], default=str))
        for name in types.keys() & data.keys() - set(unreadable)
    }
    recipe = Recipe.model_construct(**readable)
    for name in unreadable:
        # Without its default, a rule that reads the section ends in an AttributeError.
        recipe.__dict__.pop(name, None)
    for rules in recipe.rules():
        with contextlib.suppress(AttributeError):
            yield from rules


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
