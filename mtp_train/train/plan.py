"""Derive the numbers of a run (steps, micro-batches, learning rates) from a recipe and a world size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp_train.errors import RecipeError
from mtp_train.recipe.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """How an optimiser step is divided into micro-batches. The optimisation is the same for every world size."""

    max_steps: int
    seq_len_tokens: int
    sequences_per_step: int
    micro_batch_sequences: int
    world_size: int
    accumulation: int
    """Micro-batches per rank and step."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run, padding included."""
        return self.max_steps * self.sequences_per_step * self.seq_len_tokens

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch of one rank, padding included: the rows of its matrix products."""
        return self.micro_batch_sequences * self.seq_len_tokens

    def share(self, micro: int, rank: int) -> slice:
        """Return the slice of a step's sequences in micro-batch ``micro`` of a rank."""
        start = (micro * self.world_size + rank) * self.micro_batch_sequences
        return slice(start, start + self.micro_batch_sequences)


def make_plan(recipe: Recipe, world_size: int) -> Plan:
    """Derive the accumulation from ``train.tokens_per_step``.

    Raises:
        RecipeError: A step's sequences are not divisible by the processes; the message names the nearest values.
    """
    sequences = recipe.train.tokens_per_step // recipe.data.seq_len_tokens
    per_micro_step = recipe.train.micro_batch_sequences * world_size
    if sequences % per_micro_step:
        unit = per_micro_step * recipe.data.seq_len_tokens
        below = max(1, recipe.train.tokens_per_step // unit) * unit
        raise RecipeError(
            [
                f"train.tokens_per_step: {recipe.train.tokens_per_step} is {sequences} sequences; expected a multiple "
                f"of {per_micro_step} (micro_batch_sequences x {world_size} processes). Write {below} or "
                f"{below + unit}."
            ]
        )
    return Plan(
        max_steps=recipe.train.max_steps,
        seq_len_tokens=recipe.data.seq_len_tokens,
        sequences_per_step=sequences,
        micro_batch_sequences=recipe.train.micro_batch_sequences,
        world_size=world_size,
        accumulation=sequences // per_micro_step,
    )


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a 0-based step: linear warm-up, then constant or a cosine down to 0."""
    train = recipe.train
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    progress = (step - train.warmup_steps) / max(1, train.max_steps - train.warmup_steps)
    return train.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
