"""Random damage to the files of a directory: bytes, cuts, removals, and values of their JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
VALUES = st.recursive(
    SCALARS | st.sampled_from([0, -1, 10**9, 10**30, "../x", "/", [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CaseT = TypeVar("CaseT")
Damage = Callable[[Path], None]


@st.composite
def damages(draw: st.DrawFn, files: tuple[str, ...]) -> Damage:
    """Draw a change to one of the files of a directory: bytes, a cut, its removal, or a value of its JSON."""
    name = draw(st.sampled_from(files))
    kind = draw(
        st.sampled_from(["bytes", "cut", "remove", "value", "whole"] if name.endswith(".json") else ["bytes", "cut"])
    )
    at, value, content = draw(st.integers(0, 10**6)), draw(VALUES), draw(st.binary(min_size=1, max_size=8))

    def damage(directory: Path) -> None:
        path = directory / name
        whole = path.read_bytes()
        if kind == "remove":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(whole[: at % len(whole)])
        elif kind == "bytes":
            place = at % len(whole)
            path.write_bytes(whole[:place] + content + whole[place + len(content) :])
        elif kind == "whole":
            path.write_text(json.dumps(value))
        else:
            fields = json.loads(whole)
            set_one(fields, at, value)
            path.write_text(json.dumps(fields))

    return damage


def set_one(node: Any, at: int, value: Any) -> None:
    """Replace one of the values in a tree of JSON, the ``at``-th one modulo their number."""
    places = list(places_of(node))
    inside, key = places[at % len(places)]
    inside[key] = value


def places_of(node: Any) -> Iterator[tuple[Any, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in list(items):
        yield node, key
        yield from places_of(inner)


def fuzz(examples: int, cases: st.SearchStrategy[CaseT], check: Callable[[CaseT], None]) -> None:
    """Check a number of drawn cases, the same ones in every run."""
    settings(FUZZ, max_examples=examples)(given(cases)(check))()
