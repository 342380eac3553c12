"""What the annotations of a recipe's fields mean: limits, words for messages, and a walk over all fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Limit a number, or the number of items of a list."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def admits(self, value: float) -> bool:
        """Say whether a number (or a number of items) lies within the limits."""
        return (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def describe(self) -> str:
        """Return the limits in words, to follow ``a number``."""
        if self.min is not None and self.max is not None:
            return f"from {self.min:.10g} to {self.max:.10g}"
        words = [
            f"{word}{limit:.10g}{suffix}"
            for word, limit, suffix in (
                ("of ", self.min, " or more"),
                ("above ", self.above, ""),
                ("up to ", self.max, ""),
                ("below ", self.below, ""),
            )
            if limit is not None
        ]
        return " and ".join(words)


AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class OneOrMore(Bound):
    """Limit the number of items of a list that may also be written as one item, or as ``auto``."""


def walk_fields(cls: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield ``(dotted path, field, type hint)`` of every field, sections before what they hold.

    A list's items stand under ``[]``: ``data.sources[].path``.
    """
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        path, hint = dotted(prefix, item.name), hints[item.name]
        yield path, item, hint
        section, suffix = held_section(hint)
        if section is not None:
            yield from walk_fields(section, path + suffix)


def held_section(hint: Any) -> tuple[type | None, str]:
    """Return the dataclass that a hint holds (None: none) and the suffix of its path, ``[]`` where it is in a list."""
    inner, suffix = unwrap(hint)[0], ""
    if get_origin(inner) is tuple:
        inner, suffix = unwrap(get_args(inner)[0])[0], "[]"
    return (inner if is_dataclass(inner) and isinstance(inner, type) else None), suffix


def unwrap(hint: Any) -> tuple[Any, bool, Bound | None]:
    """Split a hint into its bare type, whether it may be null, and its bound."""
    bound: Bound | None = None
    is_optional = False
    while get_origin(hint) in (Annotated, Union, UnionType):
        if get_origin(hint) is Annotated:
            hint, bound = get_args(hint)
        else:
            is_optional = is_optional or NoneType in get_args(hint)
            inner = [argument for argument in get_args(hint) if argument is not NoneType]
            # The word of a OneOrMore stands beside its list.
            (hint,) = [argument for argument in inner if get_origin(argument) is not Literal] or inner
    return hint, is_optional, bound


def describe(hint: Any) -> str:
    """Return in words what a hint admits."""
    inner, is_optional, bound = unwrap(hint)
    limits = f" {bound.describe()}" if bound is not None else ""
    if inner is NoneType:
        words = "null, the one choice there is"
    elif is_dataclass(inner):
        words = "a section"
    elif get_origin(inner) is tuple:
        items = get_args(inner)
        if isinstance(bound, OneOrMore):
            words = f"{AUTO}, {describe(items[0])}, or a list of such"
        elif items[-1] is not Ellipsis:
            words = f"a list of {len(items)} items, each {describe(items[0])}"
        else:
            least = f"{bound.min:g} or more items" if bound is not None and bound.min else "items"
            words = f"a list of {least}, each {describe(items[0])}"
    elif get_origin(inner) is Literal:
        choices = get_args(inner)
        words = f"one of {', '.join(choices)}" if len(choices) > 1 else f"{choices[0]}, the one choice there is"
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[inner] + limits
    return f"{words}, or null" if is_optional else words


def default_of(item: Field[Any]) -> object:
    """Return a field's default, ``dataclasses.MISSING`` where it has none."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def shown(value: object) -> str:
    """Return a value in short, as a recipe would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, tuple):
        return f"[{', '.join(str(item) for item in value)}]"
    if is_dataclass(value):
        return "its defaults"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def dotted(prefix: str, name: str | int) -> str:
    """Join a path and a name."""
    return f"{prefix}.{name}" if prefix else str(name)
