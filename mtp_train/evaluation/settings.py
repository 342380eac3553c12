"""Settings that a run is measured and judged at: greedy, and the sampling settings that the trunk is served with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_train.checkpoints.files import GENERATION_CONFIG_FILE, Checkpoint, read_json
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.evaluation.decoding import sampling_of
from mtp_train.evaluation.prompt_records import Rule, Setting
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import EvaluateSection

LEFT_OUT = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings of a generation config that no arm is measured with, and the values that switch them off."""


def draft_depth(recipe: Recipe) -> int:
    """Return the drafts per round of a run's arms."""
    return recipe.head.num_depths if recipe.evaluate.depth is None else recipe.evaluate.depth


def greedy(depth: int) -> Setting:
    """Return greedy decoding of prompts as they are."""
    return Setting(0.0, None, depth, "greedy")


def served_settings(evaluate: EvaluateSection, trunk: Checkpoint, depth: int) -> list[Setting]:
    """Return the settings of a recipe, ``auto`` resolved by the trunk's generation config, greedy first.

    Args:
        evaluate: The recipe's section.
        trunk: The trunk, whose generation config is read.
        depth: Drafts per round.

    Raises:
        CheckpointError: The generation config has a value that the decoder cannot sample with.
    """
    try:
        settings = _settings(evaluate, trunk, depth)
        for setting in settings:
            sampling_of(setting, seed=0)
    except (MtpError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{trunk.path / GENERATION_CONFIG_FILE}: {error} evaluate.temperature, top_p and top_k are read from it "
            "where they are auto; name their values in the recipe, or correct the file."
        ) from error
    return settings


def _settings(evaluate: EvaluateSection, trunk: Checkpoint, depth: int) -> list[Setting]:
    served = generation_settings(trunk)
    temperatures, top_ps, top_ks, rules = evaluate.temperature, evaluate.top_p, evaluate.top_k, evaluate.rule
    if isinstance(temperatures, str):
        temperatures = (0.0, float(served.get("temperature", 1.0))) if served else (0.0,)
    if isinstance(top_ps, str):
        top_ps = (float(served.get("top_p", 1.0)),)
    if isinstance(top_ks, str):
        # Engines write -1 for all tokens.
        top_ks = (max(0, int(served.get("top_k", 0))),)
    drafted: tuple[Rule, ...] = ("argmax",) if isinstance(rules, str) else rules
    sampled = [
        Setting(temperature, None, depth, rule, top_p, top_k)
        for temperature in temperatures
        for top_p in top_ps
        for top_k in top_ks
        for rule in drafted
        if temperature > 0.0
    ]
    return [greedy(depth), *sampled] if 0.0 in temperatures else sampled


def generation_settings(trunk: Checkpoint) -> Mapping[str, Any]:
    """Return the trunk's generation config without unset fields; empty where it does not sample."""
    path = trunk.path / GENERATION_CONFIG_FILE
    if not path.is_file():
        return {}
    found = {key: value for key, value in read_json(path).items() if value is not None}
    # transformers decodes greedily at temperature 0, whatever the value of do_sample.
    return found if found.get("do_sample") and found.get("temperature", 1.0) else {}


def left_out(trunk: Checkpoint) -> dict[str, Any]:
    """Return sampling settings of the trunk's generation config that engines apply and no arm is measured with."""
    served = generation_settings(trunk)
    return {name: served[name] for name, off in LEFT_OUT.items() if served.get(name, off) != off}
