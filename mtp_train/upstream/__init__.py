"""Undocumented parts of other packages, a module for each; ``tests/unit/test_upstream.py`` looks all of them up."""

from __future__ import annotations

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
