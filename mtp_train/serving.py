"""Settings that a run is measured and judged at: greedy, and those that the trunk is served with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtp_inference import Sampling
from mtp_train.acceptance_gate import setting_name
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.recipe import EvaluateSection
from mtp_train.weights.files import Checkpoint, read_json

GENERATION_CONFIG_FILE = "generation_config.json"
DraftRule = Literal["argmax", "sampled"]
LEFT_OUT = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings of a generation config that no arm is measured with, and the values that switch them off."""


@dataclass(frozen=True, kw_only=True)
class ServedSetting:
    """How the trunk samples, and how drafts are made and verified."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    rule: DraftRule | Literal["greedy"] = "greedy"
    """``greedy`` at temperature 0 and nowhere else."""

    @property
    def name(self) -> str:
        """Name the setting in reports."""
        return setting_name(self.temperature, self.top_p, self.top_k, self.rule)

    def sampling(self, seed: int) -> Sampling:
        """Return what the decoder takes."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed)


GREEDY = ServedSetting()


def served_settings(evaluate: EvaluateSection, trunk: Checkpoint) -> list[ServedSetting]:
    """Return the settings of a recipe, ``auto`` resolved by the trunk's generation config, greedy first.

    Raises:
        CheckpointError: The generation config has a value that the decoder cannot sample with.
    """
    try:
        settings = _settings(evaluate, trunk)
        for setting in settings:
            setting.sampling(0)
    except (MtpError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{trunk.path / GENERATION_CONFIG_FILE}: {error} evaluate.temperature, top_p and top_k are read from it "
            "where they are auto; name their values in the recipe, or correct the file."
        ) from error
    return settings


def _settings(evaluate: EvaluateSection, trunk: Checkpoint) -> list[ServedSetting]:
    served = generation_settings(trunk)
    temperatures, top_ps, top_ks, rules = evaluate.temperature, evaluate.top_p, evaluate.top_k, evaluate.rule
    if isinstance(temperatures, str):
        temperatures = (0.0, float(served.get("temperature", 1.0))) if served else (0.0,)
    if isinstance(top_ps, str):
        top_ps = (float(served.get("top_p", 1.0)),)
    if isinstance(top_ks, str):
        # Engines write -1 for all tokens.
        top_ks = (max(0, int(served.get("top_k", 0))),)
    drafted: tuple[DraftRule, ...] = ("argmax",) if isinstance(rules, str) else rules
    sampled = [
        ServedSetting(temperature=temperature, top_p=top_p, top_k=top_k, rule=rule)
        for temperature in temperatures
        for top_p in top_ps
        for top_k in top_ks
        for rule in drafted
        if temperature > 0.0
    ]
    return [GREEDY, *sampled] if 0.0 in temperatures else sampled


def generation_settings(trunk: Checkpoint) -> Mapping[str, Any]:
    """Return the trunk's generation config where it samples, without unset fields; empty where it does not."""
    path = trunk.path / GENERATION_CONFIG_FILE
    if not path.is_file():
        return {}
    found = {key: value for key, value in read_json(path).items() if value is not None}
    # transformers samples greedily at temperature 0 whatever do_sample says.
    return found if found.get("do_sample") and found.get("temperature", 1.0) else {}


def left_out(trunk: Checkpoint) -> dict[str, Any]:
    """Return the settings of the trunk's generation config that are served and not measured."""
    served = generation_settings(trunk)
    return {name: served[name] for name, off in LEFT_OUT.items() if served.get(name, off) != off}
