"""Describe one undocumented symbol of another library, and look it up in the installed version."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import NamedTuple


class Symbol(NamedTuple):
    """An undocumented name of another library that this package uses."""

    owner: str
    """The module or class that has the name: ``package.module`` or ``package.module:Class``."""
    name: str
    """The name of a function, class, constant or attribute."""
    used_in: str
    """The module of this package that needs it, as a path below ``mtp_train`` or ``mtp_inference``."""
    why: str
    """Why the documented API does not do."""

    @property
    def path(self) -> str:
        """Return the full name, for messages."""
        return f"{self.owner.replace(':', '.')}.{self.name}"


def why_missing(symbol: Symbol) -> str | None:
    """Return what the installed version lacks of a symbol, None where the symbol is there.

    An attribute that only instances have counts as there when the source of its owner mentions it.
    """
    module, _, class_name = symbol.owner.partition(":")
    try:
        owner = importlib.import_module(module)
        owner = getattr(owner, class_name) if class_name else owner
    except (ImportError, AttributeError) as error:
        return f"{symbol.owner.replace(':', '.')} ({error})"
    if hasattr(owner, symbol.name) or re.search(rf"\.{symbol.name}\b", inspect.getsource(owner)):
        return None
    return symbol.path
