"""Trunks with several parallel residual streams, which their heads read unmixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Parallel residual streams of a trunk (hyper-connections, arXiv:2512.24880), which its head reads unmixed.

    The states that the head reads and recycles are then the streams' concatenation.
    """

    count: str
    """Field of the text config with the number of streams."""
    mixer: str
    """Class of the borrowed module that mixes the streams into one state, in front of the final norm."""
    trunk_mixer: str
    """Attribute of the decoder with the trunk's mixer."""
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the mixer's class besides the config."""
    joined: bool = False
    """Whether layers, mixer and the head's norm of the state take the streams as one concatenated state."""
