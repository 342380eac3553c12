"""Generate the JSON Schema of recipes and the reference of their fields, and describe fields for messages.

``python -m mtp_train.recipe.json_schema`` prints ``mtp_train/recipe/schema.json``, which editors read, and with the
word ``fields`` the page ``recipes/fields.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from mtp_train.head_kinds import head_kind_names
from mtp_train.losses.catalogue import loss_names
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import AUTO

Node = dict[str, Any]
_NULL = {"type": "null"}
_AUTO: Node = {"const": AUTO}


class _WithoutFieldTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        """Leave out titles, which would only repeat the names of the fields."""
        return False


def recipe_schema() -> Node:
    return Recipe.model_json_schema(schema_generator=_WithoutFieldTitles)


def schema_tree() -> Node:
    """Return the JSON Schema of recipes with every reference replaced by the section that it names."""
    return _tree(loss_names(), head_kind_names())


@cache
def _tree(losses: tuple[str, ...], kinds: tuple[str, ...]) -> Node:
    whole = recipe_schema()

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = dict(node)
        if "$ref" in node:
            node = {**whole["$defs"][node.pop("$ref").rsplit("/", 1)[-1]], **node}
        return {key: inline(value) for key, value in node.items() if key != "$defs"}

    return inline(whole)


def walk_fields(section: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield ``(dotted path, schema node)`` of every field, sections before their fields.

    The items of a list have ``[]`` in their path: ``data.sources[].path``.
    """
    for name, node in section["properties"].items():
        path = dotted(prefix, name)
        yield path, node
        held, suffix = held_section(node)
        if held is not None:
            yield from walk_fields(held, path + suffix)


def held_section(node: Node) -> tuple[Node | None, str]:
    """Return the section in a field (None: there is none) and the suffix of its path, ``[]`` for a list of sections."""
    inner, suffix = not_null(node), ""
    if "items" in inner:
        inner, suffix = inner["items"], "[]"
    return (inner if "properties" in inner else None), suffix


def not_null(node: Node) -> Node:
    """Return the node without ``or null``; of a field that takes ``auto``, one item or a list, the node of the list."""
    return [arm for arm in node.get("anyOf", [node]) if arm != _NULL][-1]


def describe(node: Node) -> str:
    match node:
        case {"anyOf": [first, *arms]} if first == _AUTO and all("items" not in arm for arm in arms):
            return f"{describe(arms[0] if len(arms) == 1 else {'anyOf': arms})}, or {AUTO}"
        case {"anyOf": [inner, null]} if null == _NULL:
            return f"{describe(inner)}, or null"
        case {"anyOf": [_, item, _]}:
            return f"{AUTO}, {describe(item)}, or a list of such"
        case {"properties": _}:
            return "a section"
        case {"items": item}:
            least, most = node.get("minItems"), node.get("maxItems")
            count = "items" if least is None else f"{least} items" if least == most else f"{least} or more items"
            return f"a list of {count}, each {describe(item)}"
        case {"enum": choices}:
            return f"one of {', '.join(choices)}"
    kinds = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "object": "names with values",
    }
    return kinds[node["type"]] + _limits(node)


def _limits(node: Node) -> str:
    if "minimum" in node and "maximum" in node:
        return f" from {node['minimum']:.10g} to {node['maximum']:.10g}"
    words = [
        f"{word} {node[key]:.10g}{suffix}"
        for word, key, suffix in (
            ("of", "minimum", " or more"),
            ("above", "exclusiveMinimum", ""),
            ("up to", "maximum", ""),
            ("below", "exclusiveMaximum", ""),
        )
        if key in node
    ]
    return f" {' and '.join(words)}" if words else ""


def shown(value: object) -> str:
    """Return a value in short, a list of values with its items."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "a section" if value else "{}"
    if isinstance(value, list | tuple):
        has_sections = any(isinstance(item, Mapping) for item in value)
        return f"a list of {len(value)}" if has_sections else f"[{', '.join(map(str, value))}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def dotted(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


_HEADING = """# Fields of a recipe

Generated by `python -m mtp_train.recipe.json_schema fields`; edit `mtp_train/recipe/sections.py` instead."""


def _section_lines(section: Node, path: str) -> Iterator[str]:
    yield from ("", f"## {f'`{path}`' if path else 'The recipe'}", "", section["description"], "")
    yield from ("| field | value | default | meaning |", "|---|---|---|---|")
    for name, node in section["properties"].items():
        # A section has its own table. If it may be null or is in a list, its field has a row as well.
        if "properties" not in node:
            default = f"`{shown(node['default']).strip(chr(39))}`" if "default" in node else "required"
            yield f"| `{name}` | {describe(node)} | {default} | {' '.join(node['description'].split())} |"
    for name, node in section["properties"].items():
        held, suffix = held_section(node)
        if held is not None:
            yield from _section_lines(held, dotted(path, name) + suffix)


if __name__ == "__main__":
    if sys.argv[1:] == ["fields"]:
        print("\n".join((_HEADING, *_section_lines(schema_tree(), ""))))
    else:
        print(json.dumps(recipe_schema(), indent=1))
