"""From plain YAML values to frozen dataclasses, driven by the type annotations alone.

Understood: ``int``, ``float``, ``bool``, ``str``, ``None``, ``Literal``, ``X | None``, ``tuple[X, ...]`` and
``tuple[X, Y]`` (lists in YAML), nested dataclasses, and ``Annotated[X, Bound(...)]`` around any of them. Problems are
gathered, never raised, so that a reader learns of all of them at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from mtp_train.recipe_hints import AUTO, OneOrMore, default_of, describe, dotted, shown, unwrap, walk_fields

T = TypeVar("T")


@dataclass(frozen=True)
class _Spot:
    """Where a value stands: its dotted path, and the default it could fall back to (``MISSING``: none)."""

    path: str
    default: object

    def inside(self, name: str | int) -> _Spot:
        return _Spot(dotted(self.path, name), MISSING)

    @property
    def cure(self) -> str:
        if self.default is MISSING:
            return "Correct it; there is no default."
        return f"Correct it, or leave it out for {shown(self.default)}."


class Decoder:
    """Turn plain values into what the annotations declare; gather what does not fit.

    Attributes:
        problems: One line per problem, ``"{path}: {found}; expected {rule}. {cure}"``.
        failed: The dotted paths that have no usable value. What was decoded holds None there.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.failed: list[str] = []
        self._known_paths: list[str] = []

    def decode(self, cls: type[T], value: object) -> T:
        """Decode a whole document into the dataclass ``cls``; trust the result only while ``problems`` is empty."""
        self._known_paths = [path for path, _, _ in walk_fields(cls)]
        decoded: T = self._section(cls, value, _Spot("", MISSING))
        return decoded

    def usable(self, paths: Iterable[str]) -> bool:
        """Say whether the values at all these dotted paths, and all within them, were decoded."""
        return not any(_overlap(path, failed) for path in paths for failed in self.failed)

    def _reject(self, spot: _Spot, found: str, expected: str, cure: str | None = None) -> None:
        self.problems.append(f"{spot.path or 'recipe'}: {found}; expected {expected}. {cure or spot.cure}")
        self.failed.append(spot.path)

    def _value(self, hint: Any, value: object, spot: _Spot) -> Any:
        inner, is_optional, bound = unwrap(hint)
        if value is None and (is_optional or inner is NoneType):
            return None
        if is_dataclass(inner) and isinstance(inner, type):
            return self._section(inner, value, spot)
        if get_origin(inner) is tuple:
            return self._items(hint, value, spot)
        if get_origin(inner) is Literal:
            return self._choice(hint, value, spot)
        number = _as_declared(inner, value)
        if number is None:
            self._reject(spot, f"{shown(value)}{_kind(value)}", describe(hint), _scalar_cure(inner, value))
        elif bound is not None and not bound.admits(number):
            self._reject(spot, shown(value), describe(hint))
        else:
            return number
        return None

    def _choice(self, hint: Any, value: object, spot: _Spot) -> object:
        choices = get_args(unwrap(hint)[0])
        if isinstance(value, str) and value in choices:
            return value
        near = difflib.get_close_matches("none" if value is None else str(value), choices, n=1)
        self._reject(spot, shown(value), describe(hint), f"Did you mean {near[0]}?" if near else None)
        return None

    def _items(self, hint: Any, value: object, spot: _Spot) -> object:
        inner, _, bound = unwrap(hint)
        hints = get_args(inner)
        if isinstance(bound, OneOrMore) and not isinstance(value, list | tuple):
            item = value if value == AUTO else self._value(hints[0], value, spot)
            return item if item is None or item == AUTO else (item,)
        if not isinstance(value, list | tuple):
            holds_sections = is_dataclass(unwrap(hints[0])[0])
            cure = f"Write {spot.path}: [{value}]." if isinstance(value, str) and not holds_sections else None
            self._reject(spot, f"{shown(value)}{_kind(value)}", describe(hint), cure)
            return None
        is_open = hints[-1] is Ellipsis
        if (bound is not None and not bound.admits(len(value))) or (not is_open and len(value) != len(hints)):
            self._reject(spot, f"a list of {len(value)}", describe(hint))
            return None
        return tuple(
            self._value(hints[0] if is_open else hints[index], item, spot.inside(index))
            for index, item in enumerate(value)
        )

    def _section(self, cls: type, value: object, spot: _Spot) -> Any:
        if not isinstance(value, Mapping):
            listed = ", ".join(item.name for item in fields(cls))
            self._reject(spot, f"{shown(value)}{_kind(value)}", f"a section with the fields {listed}")
            return None
        names = [item.name for item in fields(cls)]
        for key in value:
            if key not in names:
                self._reject_key(spot, key, names)
        hints = get_type_hints(cls, include_extras=True)
        return cls(**{item.name: self._field(item, hints[item.name], value, spot) for item in fields(cls)})

    def _field(self, item: Field[Any], hint: Any, section: Mapping[Any, object], spot: _Spot) -> object:
        at = _Spot(dotted(spot.path, item.name), default_of(item))
        if item.name in section:
            return self._value(hint, section[item.name], at)
        if at.default is not MISSING:
            return at.default
        if is_dataclass(hint) and isinstance(hint, type):
            # Names the missing fields one by one.
            return self._section(hint, {}, at)
        self._reject(at, "missing", describe(hint), "Add it.")
        return None

    def _reject_key(self, spot: _Spot, key: object, names: list[str]) -> None:
        namesakes = [path for path in self._known_paths if path.endswith(f".{key}")]
        near = difflib.get_close_matches(str(key), names, n=1)
        meant = namesakes or [dotted(spot.path, name) for name in near] or _elsewhere(str(key), self._known_paths)
        rule = f"a field of {spot.path or 'the recipe'}" if meant else f"one of {', '.join(names)}"
        cure = f"Did you mean {' or '.join(meant)}?" if meant else "Remove it."
        self.problems.append(f"{dotted(spot.path, str(key))}: unknown; expected {rule}. {cure}")
        # The value that the misspelt key was to give is not known: rules on it would mislead.
        self.failed += meant


def _as_declared(declared: Any, value: object) -> Any:
    """Return the value as the declared scalar type, None where it is of another."""
    if declared is float and _is_number(value):
        return float(value) if _is_finite(value) else None
    if declared is str and value == "":
        return None
    is_declared = isinstance(value, declared) and (declared is bool or not isinstance(value, bool))
    return value if is_declared else None


def _kind(value: object) -> str:
    """Name the type of a value, where the value itself does not say it."""
    if isinstance(value, str) and value:
        return " (text)"
    if _is_number(value):
        return " (a number)" if _is_finite(value) else " (not a finite number)"
    return ""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: int | float) -> bool:
    # An int beyond the range of a float cannot be asked by math.isfinite.
    return abs(value) <= sys.float_info.max


def _scalar_cure(declared: Any, value: object) -> str | None:
    if declared is str and isinstance(value, bool | int | float):
        return f"Put it in quotes: {str(value)!r}."
    if declared is int and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    return None


def _elsewhere(key: str, paths: list[str]) -> list[str]:
    """Return the field, of whatever section, whose own name is nearest to ``key``."""
    names = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    return [names[name] for name in difflib.get_close_matches(key, names, n=1, cutoff=0.75)]


def _overlap(path: str, other: str) -> bool:
    """Say whether one of two dotted paths is the other or lies within it."""
    return not other or f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
