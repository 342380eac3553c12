"""Translate a recipe into the options of training (division of a step, AdamW, memory) and into settings to measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path

from mtp_train.checkpoints.files import GENERATION_CONFIG_FILE, Checkpoint
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.evaluation.grid import generation_settings, greedy
from mtp_train.evaluation.prompt_records import Rule, Setting
from mtp_train.families.kinds.kind import serves_draft_vocab
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import is_auto
from mtp_train.train.log import Tracking
from mtp_train.train.plan import MemoryOptions, Plan, TrainOptions, make_plan
from mtp_train.trunk.precision import COMPUTE_DTYPES

MEASURES = 10
"""Default number of measurements for ``train.select``, besides that of the start."""

STATE = "state"
"""Directory of the checkpoints of training in a run directory."""


def plan_of(recipe: Recipe, world_size: int) -> Plan:
    return make_plan(
        max_steps=recipe.train.max_steps,
        tokens_per_step=recipe.train.tokens_per_step,
        seq_len_tokens=recipe.data.seq_len_tokens,
        micro_batch_sequences=recipe.train.micro_batch_sequences,
        world_size=world_size,
    )


def train_options(recipe: Recipe) -> TrainOptions:
    """Return the fields of the sections ``train`` and ``objective`` that the training loop reads."""
    of_sections = {**dict(recipe.train), **dict(recipe.objective)}
    return TrainOptions(**{one.name: of_sections[one.name] for one in fields(TrainOptions)})


def tracking_of(recipe: Recipe) -> Tracking:
    return Tracking(**dict(recipe.track))


def measured_tokens(recipe: Recipe) -> tuple[int, int]:
    """Return how often ``train.select`` measures the head, and the most tokens of a measurement."""
    spec = recipe.train.select
    steps = recipe.train.max_steps
    if spec is None:
        return 0, 0
    return 1 + math.ceil(steps / (spec.every_steps or math.ceil(steps / MEASURES))), spec.tokens


def memory_options(recipe: Recipe) -> MemoryOptions:
    """Return the settings that decide the memory of training; an automatic precision counts as fp32.

    A run that goes on from a hidden-state cache and does not decode loads no layers, as with a server of states.
    """
    return MemoryOptions(
        num_depths=recipe.head.num_depths,
        compute_dtype=COMPUTE_DTYPES.get(recipe.train.precision, COMPUTE_DTYPES["fp32"]),
        recompute=recipe.train.gradient_checkpointing,
        held=recipe.model.dtype,
        quantization=recipe.model.quantization,
        offloads=recipe.model.offload is not None,
        is_served=recipe.train.states is not None
        # A hidden-state cache is complete before the first step.
        or (not recipe.decodes and recipe.train.hidden_cache is not None and Path(recipe.run_dir, STATE).exists()),
        loss_vocab=recipe.head.draft_vocab if serves_draft_vocab(recipe.head.kind) else None,
        lora=recipe.head.lora,
        # Independent depths run whole at all positions.
        num_starts=None if recipe.objective.unroll == "fastmtp" else recipe.data.loss_positions,
    )


def run_settings(recipe: Recipe, trunk: Checkpoint) -> list[Setting]:
    """Return the settings that a run is measured and judged at, greedy first: every combination of ``evaluate``.

    Values other than temperatures apply above 0. ``auto`` stands for the trunk's generation config, and for ``argmax``
    drafts.

    Raises:
        CheckpointError: The generation config has a value that the decoder cannot sample with.
    """
    depth, asked = recipe.draft_depth, recipe.evaluate
    rules: Sequence[Rule] = ["argmax"] if is_auto(asked.rule) else asked.rule
    try:
        served = generation_settings(trunk)
        own = (0.0, float(served.get("temperature", 1.0))) if served else (0.0,)
        temperatures = own if is_auto(asked.temperature) else asked.temperature
        sampled = [
            Setting(temperature, None, depth, rule, top_p, top_k)
            for temperature, top_p, top_k, rule in product(
                temperatures,
                [float(served.get("top_p", 1.0))] if is_auto(asked.top_p) else asked.top_p,
                # Engines write -1 for all tokens.
                [max(0, int(served.get("top_k", 0)))] if is_auto(asked.top_k) else asked.top_k,
                rules,
            )
            if temperature > 0.0
        ]
        for setting in sampled:
            setting.sampling(seed=0)
    except (MtpError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{trunk.path / GENERATION_CONFIG_FILE}: {error} evaluate.temperature, top_p and top_k are read from it "
            "where they are auto; name their values in the recipe, or correct the file."
        ) from error
    return [greedy(depth), *sampled] if 0.0 in temperatures else sampled
