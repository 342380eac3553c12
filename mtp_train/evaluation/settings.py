"""Settings that a run is measured and judged at: greedy, and the sampling settings that the trunk is served with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mtp_train.checkpoints.files import GENERATION_CONFIG_FILE, Checkpoint, read_json
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.evaluation.prompt_records import Rule, Setting

LEFT_OUT = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings of a generation config that no arm is measured with, and the values that switch them off."""


def greedy(depth: int) -> Setting:
    """Return greedy decoding of prompts as they are."""
    return Setting(0.0, None, depth, "greedy")


def served_settings(
    trunk: Checkpoint,
    depth: int,
    temperature: Sequence[float] | str,
    top_p: Sequence[float] | str,
    top_k: Sequence[int] | str,
    rule: Sequence[Rule] | str,
) -> list[Setting]:
    """Return every combination of sampling parameters, greedy first; a text stands for the trunk's generation config.

    Args:
        trunk: The trunk, whose generation config is read.
        depth: Drafts per round.
        temperature: Temperatures. Values of the other parameters apply above 0.
        top_p: Values of top-p.
        top_k: Values of top-k; 0 for no limit.
        rule: How drafts are made above temperature 0; a text for ``argmax``.

    Raises:
        CheckpointError: The generation config has a value that the decoder cannot sample with.
    """
    try:
        served = generation_settings(trunk)
        if isinstance(temperature, str):
            temperature = (0.0, float(served.get("temperature", 1.0))) if served else (0.0,)
        if isinstance(top_p, str):
            top_p = (float(served.get("top_p", 1.0)),)
        if isinstance(top_k, str):
            # Engines write -1 for all tokens.
            top_k = (max(0, int(served.get("top_k", 0))),)
        rules: Sequence[Rule] = ("argmax",) if isinstance(rule, str) else rule
        sampled = [
            Setting(one, None, depth, its_rule, its_p, its_k)
            for one, its_p, its_k, its_rule in product(temperature, top_p, top_k, rules)
            if one > 0.0
        ]
        for setting in sampled:
            setting.sampling(seed=0)
    except (MtpError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{trunk.path / GENERATION_CONFIG_FILE}: {error} evaluate.temperature, top_p and top_k are read from it "
            "where they are auto; name their values in the recipe, or correct the file."
        ) from error
    return [greedy(depth), *sampled] if 0.0 in temperature else sampled


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
