"""Trunks with several residual streams side by side, which their heads read unmixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Residual streams that a trunk keeps side by side (hyper-connections, arXiv:2512.24880), its head reads unmixed.

    States that the head reads and recycles are then as wide as all of them together.
    """

    count: str
    """Field of the text config with their number."""
    mixer: str
    """Class of the borrowed module that makes one state of them, before the final norm."""
    trunk_mixer: str
    """The trunk's own, by attribute of the decoder."""
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    """What the mixer's class is told besides the config."""
    joined: bool = False
    """Whether layers, mixer and the head's norm of the state take them as one state of that width."""
