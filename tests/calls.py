"""What a test watches of a program at work."""

from __future__ import annotations

from typing import Any

import pytest


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Return the list to which each call from now on of an owner's function adds its positional arguments."""
    calls = list[tuple[Any, ...]]()
    stock = getattr(owner, name)

    def noted(*given: Any, **settings: Any) -> Any:
        calls.append(given)
        return stock(*given, **settings)

    monkeypatch.setattr(owner, name, noted)
    return calls
