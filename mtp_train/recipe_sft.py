"""What a recipe can say of a fine-tune: its section, with type, limits, default and meaning, as in ``recipe``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mtp_train.recipe_hints import Bound

Count = Annotated[int, Bound(min=1)]
Positive = Annotated[float, Bound(above=0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrunkLoraSpec:
    """LoRA on the trunk: its weights stay, low-rank matrices beside them are trained, and the export has them merged.

    The adapter itself is left in the run directory.
    """

    r: Count = 16
    """The rank."""
    alpha: Count = 32
    """What the matrices add is scaled by this over `r`."""
    targets: Annotated[tuple[str, ...], Bound(min=1)] | None = None
    """Linear layers of the trunk by the last part of their names, such as `q_proj`; null takes all of them. Stacked
    experts and routers stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftSection:
    """Fine-tune `model.trunk` itself, by transformers' Trainer, on the sources' own responses, its head kept.

    `train` is then about the trunk. Only the tokens of the assistant, of a response or of plain text are learnt. The
    checkpoint is written in the trunk's own layout, with a head, whatever that is worth: the report says what.
    """

    lora: TrunkLoraSpec | None = None
    """LoRA on the trunk; null trains all of its weights."""
    head: Literal["kept", "beside"] = "beside"
    """`kept`: the head stays what it is, and goes stale as the trunk moves. `beside`: it is trained while the trunk is,
    without a gradient into that; the export has the better of the two heads, by the gate."""
    head_lr: Positive = 1e-4
    """Peak learning rate of the head beside; it rises and falls as the trunk's does."""
