"""How engines wire a head, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How one engine wires the head where engines disagree."""

    hidden: Literal["after_final_norm", "before_final_norm", "of_layers"] = "after_final_norm"
    """Which of the trunk's states the head reads; ``of_layers``: those of ``trunk_layers``, side by side."""
    recycle: Literal["after_final_norm", "before_final_norm", "trunk"] = "after_final_norm"
    """The hidden input of depth k + 1: a state of depth k, or the trunk's once more."""
    zero_first_embedding: bool = False
    """Whether the row at position 0 gets a zero embedding (before its norm)."""
    modules: Literal["each", "first"] = "each"
    """Of a head with several modules: depth k uses module k (``each``), or every depth the first one."""
    prefix: Literal["chained", "trunk"] = "chained"
    """What rows over the text read in a module after the first. ``chained``: what the module before it says of the row,
    and one token further on. ``trunk``: what the first module's rows read, the trunk's state and the next token; only
    drafted rows chain. A prompt then takes every module no further than its keys and values, where a chain runs all but
    the last in full; training takes more passes, see ``heads.step.unroll``."""
    position_offset: int = 0
    """Added to every position that the head's rotary embedding sees; attention sees only differences."""
    centred: bool = False
    """Whether the head's final norm is a LayerNorm: it subtracts a state's mean first."""


LLAMA_CPP_POSITIONS = Convention(position_offset=1)
"""llama.cpp puts a row at the place of the token that it reads, the Python engines at that of its hidden state."""
