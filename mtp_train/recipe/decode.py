"""Validate plain YAML values with pydantic, and word each of its errors for the person who wrote the recipe."""

from __future__ import annotations

import copy
import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

from pydantic import ValidationError

from mtp_train.recipe.json_schema import (
    Node,
    describe,
    dotted,
    held_section,
    not_null,
    recipe_adapter,
    schema_tree,
    shown,
    shown_default,
    walk_fields,
)
from mtp_train.recipe.schema import Recipe

Loc = tuple[int | str, ...]
_UNKNOWN_KEY = ("unexpected_keyword_argument", "invalid_key")


@dataclass
class Decoded:
    """A recipe as far as it could be read.

    Attributes:
        recipe: The recipe. It has defaults or samples at the paths in ``failed``; None if nothing could be read.
        problems: One line per problem, ``"{path}: {found}; expected {rule}. {hint}"``.
        failed: The dotted paths that have no usable value.
    """

    recipe: Recipe | None = None
    problems: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def usable(self, paths: Iterable[str]) -> bool:
        """Return whether the values at all these dotted paths, and all within them, were read."""
        return not any(_overlap(path, failed) for path in paths for failed in self.failed)

    def reject(self, path: str, found: str, expected: str, hint: str) -> None:
        """Add a problem with the value at a path."""
        self.problems.append(f"{path or 'recipe'}: {found}; expected {expected}. {hint}")
        self.failed.append(path)


def decode(data: object) -> Decoded:
    """Read a recipe from plain values. The recipe is valid only if ``problems`` is empty."""
    try:
        return Decoded(recipe_adapter().validate_python(data))
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False, include_context=False, include_input=False)
    decoded = Decoded()
    # Unknown keys first: a misspelt key is often the cause of a missing field.
    errors.sort(key=lambda error: error["type"] not in _UNKNOWN_KEY)
    for error in errors:
        kind, loc = error["type"], error["loc"]
        if kind in _UNKNOWN_KEY:
            _reject_key(decoded, data, loc)
        elif kind == "missing":
            _reject_missing(decoded, data, loc)
        else:
            _reject_value(decoded, _locate(data, loc), kind)
    try:
        repaired = copy.deepcopy(data)
        for error in errors:
            _repair(repaired, error["loc"], is_unknown=error["type"] in _UNKNOWN_KEY)
        decoded.recipe = recipe_adapter().validate_python(repaired)
    except (ValidationError, LookupError):  # the document is no mapping, or a YAML anchor is used for two sections
        decoded.failed.append("")
    return decoded


@dataclass(frozen=True)
class _Spot:
    """The place that a location of pydantic refers to, with a hint that fits any wrong value there."""

    path: str
    value: Any
    node: Node
    hint: str


def _locate(data: Any, loc: Loc) -> _Spot:
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
    hint = "Correct it; there is no default." if default is None else f"Correct it, or leave it out for {default}."
    return _Spot(path, data, node, hint)


def _reject_value(decoded: Decoded, spot: _Spot, kind: str) -> None:
    value, inner = spot.value, not_null(spot.node)
    found, expected, hint = shown(value), describe(spot.node), spot.hint
    # pydantic counts only valid items: it also calls a list with wrong items too short.
    if kind == "too_short" and (not isinstance(value, list | tuple) or len(value) >= inner["minItems"]):
        return
    if kind.endswith("_type") or kind == "finite_number":
        found += _type_in_words(value)
    if "enum" in inner:
        near = difflib.get_close_matches("none" if value is None else str(value), inner["enum"], n=1)
        hint = f"Did you mean {near[0]}?" if near else hint
    elif "properties" in inner:
        expected = f"a section with the fields {', '.join(inner['properties'])}"
    elif "items" in inner and isinstance(value, str) and held_section(inner)[0] is None:
        hint = f"Write {spot.path}: [{value}]."
    elif inner.get("type") == "string" and isinstance(value, bool | int | float):
        hint = f"Put it in quotes: {str(value)!r}."
    elif inner.get("type") == "integer" and isinstance(value, float) and value.is_integer():
        hint = f"Write {int(value)}."
    decoded.reject(spot.path, found, expected, hint)


def _reject_missing(decoded: Decoded, data: object, loc: Loc) -> None:
    """Reject a missing field, or each required field of a missing section."""
    spot = _locate(data, loc)
    if "properties" not in spot.node:
        decoded.reject(spot.path, "missing", describe(spot.node), "Add it.")
    for name in spot.node.get("required", ()):
        _reject_missing(decoded, data, (*loc, name))


def _reject_key(decoded: Decoded, data: object, loc: Loc) -> None:
    spot, key = _locate(data, loc[:-1]), str(loc[-1])
    names, paths = list(not_null(spot.node)["properties"]), [path for path, _ in walk_fields(schema_tree())]
    near = [dotted(spot.path, name) for name in difflib.get_close_matches(key, names, n=1)]
    meant = [path for path in paths if path.endswith(f".{key}")] or near or _elsewhere(key, paths)
    expected = f"a field of {spot.path or 'the recipe'}" if meant else f"one of {', '.join(names)}"
    hint = f"Did you mean {' or '.join(meant)}?" if meant else "Remove it."
    decoded.problems.append(f"{dotted(spot.path, key)}: unknown; expected {expected}. {hint}")
    # The value that the misspelt key was to set is not known: rules on it would mislead.
    decoded.failed += meant


def _elsewhere(key: str, paths: list[str]) -> list[str]:
    """Return the path of the field, in any section, whose name is most similar to ``key``."""
    names = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    return [names[name] for name in difflib.get_close_matches(key, names, n=1, cutoff=0.75)]


def _repair(data: Any, loc: Loc, *, is_unknown: bool) -> None:
    """Remove an unknown key; replace a wrong value by the default of its field, or by a sample if there is none."""
    while loc and isinstance(loc[-1], int) and not is_unknown:
        loc = loc[:-1]
    if not loc:
        return
    section = reduce(getitem, loc[:-1], data)
    for key in [key for key in section if str(key) == str(loc[-1])]:
        del section[key]
    node = not_null(_locate(data, loc[:-1]).node)
    if loc[-1] in node.get("required", ()):
        section[loc[-1]] = _sample(node["properties"][loc[-1]])


def _sample(node: Node) -> Any:
    """Return a plain value for a required field that passes validation."""
    node = not_null(node)
    if "properties" in node:
        return {name: _sample(node["properties"][name]) for name in node.get("required", ())}
    if "items" in node:
        return [_sample(node["items"])]
    return node["enum"][0] if "enum" in node else "text" if node["type"] == "string" else 1


def _type_in_words(value: object) -> str:
    """Return the type of a value in words, unless :func:`shown` shows it."""
    if isinstance(value, str) and value:
        return " (text)"
    if isinstance(value, int | float) and not isinstance(value, bool):
        # math.isfinite would overflow on an int beyond the range of a float.
        return " (a number)" if abs(value) <= sys.float_info.max else " (not a finite number)"
    return ""


def _overlap(path: str, other: str) -> bool:
    """Return whether one of two dotted paths is the other or lies within it."""
    return not other or f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
