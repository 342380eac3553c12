"""The wiring of a head around its decoder layer, which differs between engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One engine's wiring of a head, in the points where engines disagree."""

    hidden: Literal["after_final_norm", "before_final_norm", "of_layers"] = "after_final_norm"
    """The trunk's hidden state that the head reads: after or before the final norm. ``of_layers``: the inputs of the
    layers in ``Wiring.trunk_layers``, concatenated along the feature axis."""
    recycle: Literal["after_final_norm", "before_final_norm", "trunk"] = "after_final_norm"
    """The hidden input of depth k + 1: the state of depth k after or before the head's final norm, or the trunk's
    hidden state again."""
    zero_first_embedding: bool = False
    """Whether the row at position 0 gets a zero embedding (before the norm of the embedding)."""
    modules: Literal["each", "first"] = "each"
    """Module of depth k in a head with several modules: module k (``each``), or always the first one (``first``)."""
    prefix: Literal["chained", "trunk"] = "chained"
    """Input of a later module's rows over the given text. ``chained``: the output of the module before it at the same
    row, and the token one position further on. ``trunk``: the input of the first module's rows (the trunk's hidden
    state and the next token); only drafted rows are chained. Over a prompt, ``trunk`` needs no more than the keys and
    values of every module, whereas ``chained`` runs all modules but the last in full. In training ``trunk`` needs more
    passes; see ``heads.step.unroll``."""
    position_offset: int = 0
    """Added to every position in the head's rotary embedding. Rotary attention itself depends on differences of
    positions only."""
    centred: bool = False
    """Whether the head's final norm is a LayerNorm, which first subtracts the mean of the state."""


LLAMA_CPP_POSITIONS = Convention(position_offset=1)
"""llama.cpp gives a row the position of the token that it reads; the Python engines give it the position of its hidden
state, one lower."""
