"""What a recipe can say of a study: its sections, with type, limits, default and meaning, as in ``recipe``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mtp_train.recipe_hints import Bound

Count = Annotated[int, Bound(min=1)]
Positive = Annotated[float, Bound(above=0)]
Objective = Literal["ce", "kl", "reverse_kl", "tv", "lk", "e2e_tv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuneSpec:
    """Fine-tune the trunk of `model.head_from` on the sources' own responses, to watch its head go stale.

    transformers' Trainer does it, on one process, in `train.precision` with the weights in fp32. The held-out groups
    are left out, and the trunk is thrown away.
    """

    max_steps: Count
    """Optimiser steps."""
    lr: Positive
    """Peak learning rate: it rises over the first tenth of the steps and falls along a cosine."""
    documents_per_step: Count = 8
    """Documents of one step."""
    points: Annotated[tuple[Annotated[float, Bound(above=0, max=1)], ...], Bound(min=1)] = (0.02, 0.05, 0.15, 0.4, 1.0)
    """Shares of the steps after which the head is measured; it is measured before the first, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftSection:
    """How the untouched head of `model.head_from` fares, the further its trunk is fine-tuned.

    It drafts for every such trunk on the held-out prompts, greedily.
    """

    checkpoints: tuple[str, ...] = ()
    """Checkpoints kept along a fine-tune of `model.head_from`, in order: directories or hub ids."""
    fine_tune: FineTuneSpec | None = None
    """Where none were kept: a fine-tune made here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySection:
    """`model.head_from` with its own head against `model.trunk` with its grafted head and with retrained ones.

    One head is retrained for each objective: same data, same steps, same seed. All of `evaluate.arms` decode the same
    prompts, and the claim that retraining on the distilled distribution brings acceptance back to the vanilla level is
    put to the test. Nothing is exported.
    """

    objectives: Annotated[tuple[Objective, ...], Bound(min=1)] = ("kl", "ce")
    """What to retrain a head towards, see `objective.loss`; each gives an arm, `retrained-kl` say. The verdict is about
    the first, the others are compared with it."""
    suite: str | None = None
    """A prompt suite, as `mtp-train evaluate --suite` takes it, less what heads are trained on; null: the held-out
    prompts of `data.sources`."""
    prompts_per_task: Count = 8
    """Prompts of each of the suite's tasks."""
    vanilla_sources: tuple[str, ...] = ()
    """Sources, as `data.sources[].path`, of text that `model.head_from` was made for: the vanilla level is then that on
    `evaluate.prompts` of them. Empty: that on the prompts of all arms."""
    temperatures: Annotated[tuple[Annotated[float, Bound(min=0)], ...], Bound(min=1)] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    rules: Annotated[tuple[Literal["greedy", "argmax", "sampled"], ...], Bound(min=1)] = ("greedy", "sampled")
    """How drafts are made and verified: `greedy` at temperature 0; above it `argmax`, the head's first choice, or
    `sampled`, drawn from its distribution and verified by rejection sampling."""
    depths: Annotated[tuple[Annotated[int, Bound(min=1, max=7)], ...], Bound(min=1)] = (3,)
    """Drafts a round."""
    batch: Count = 1
    """Prompts decoded together; more than 1 is quicker, and its speeds are those of a batch."""
    margin: Annotated[float, Bound(above=0, below=1)] = 0.05
    """Share of the vanilla level that may be missing where acceptance still counts as back at it."""
    drift: DriftSection | None = None
    """The drift curve; null draws none."""
