"""Settings that a run is judged at come from the recipe or from the trunk's generation config."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_recipe import SMALLEST

from json_files import write_json
from mtp_inference.sampling.distributions import MIN_TEMPERATURE
from mtp_train.errors import CheckpointError
from mtp_train.evaluation.grid import greedy, left_out
from mtp_train.evaluation.prompt_records import Rule, Setting
from mtp_train.recipe import sections
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.settings import run_settings

DEPTH = 3
GREEDY = greedy(DEPTH)
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


@dataclasses.dataclass
class Trunk:
    path: Path


def settings(tmp_path: Path, config: dict[str, Any] | None = None, **evaluate: Any) -> list[Setting]:
    if config is not None:
        write_json(tmp_path / "generation_config.json", config)
    trunk: Any = Trunk(tmp_path)
    asked = {name: evaluate.get(name, "auto") for name in ("temperature", "top_p", "top_k", "rule")}
    recipe = load_recipe(SMALLEST).replaced({f"evaluate.{name}": value for name, value in asked.items()})
    return run_settings(recipe, trunk)


def drawn(temperature: float, rule: Rule = "argmax", top_p: float = 1.0, top_k: int = 0) -> Setting:
    return Setting(temperature, None, DEPTH, rule, top_p, top_k)


def test_auto_is_greedy_and_what_the_generation_config_samples_with(tmp_path: Path) -> None:
    assert settings(tmp_path, QWEN) == [
        GREEDY,
        drawn(0.6, top_p=0.95, top_k=20),
    ]


@pytest.mark.parametrize(
    "config",
    [None, {}, {"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}, {"do_sample": True, "temperature": 0.0}],
    ids=["no file", "empty", "greedy", "do_sample left out", "temperature 0"],
)
def test_auto_is_greedy_alone_where_the_trunk_is_not_served_with_sampling(
    tmp_path: Path, config: dict[str, Any] | None
) -> None:
    assert settings(tmp_path, config) == [GREEDY]


def test_what_a_generation_config_leaves_out_is_off(tmp_path: Path) -> None:
    assert settings(tmp_path, {"do_sample": True, "temperature": None}) == [
        GREEDY,
        drawn(1.0),
    ]


@pytest.mark.parametrize(
    "odd", [{"top_p": 0.0}, {"temperature": "warm"}, {"temperature": 1e-5}, {"top_k": [20]}], ids=lambda one: str(one)
)
def test_a_generation_config_that_nothing_can_sample_with_is_refused_by_its_path(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*name their values in the recipe"):
        settings(tmp_path, {**QWEN, **odd})
    assert settings(tmp_path, {**QWEN, "top_k": -1})[1].top_k == 0


def test_a_value_takes_the_place_of_auto_field_by_field(tmp_path: Path) -> None:
    assert settings(tmp_path, QWEN, temperature=(0.8,)) == [drawn(0.8, top_p=0.95, top_k=20)]
    assert settings(tmp_path, QWEN, temperature=(0.0,)) == [GREEDY]
    assert settings(tmp_path, QWEN, top_k=(0,), rule=("sampled",))[1] == drawn(0.6, "sampled", top_p=0.95)


def test_lists_are_combined_and_greedy_comes_first_and_once(tmp_path: Path) -> None:
    found = settings(tmp_path, None, temperature=(1.0, 0.0, 0.6), top_p=(1.0, 0.9), rule=("argmax", "sampled"))
    assert found[0] == GREEDY
    assert [(one.temperature, one.top_p, one.rule) for one in found[1:]] == [
        (temperature, top_p, rule)
        for temperature in (1.0, 0.6)
        for top_p in (1.0, 0.9)
        for rule in ("argmax", "sampled")
    ]
    assert len({one.name for one in found}) == 9


def test_what_is_served_and_not_measured_is_named(tmp_path: Path) -> None:
    trunk: Any = Trunk(tmp_path)
    settings(tmp_path, {**QWEN, "repetition_penalty": 1.05, "min_p": 0.0})
    assert left_out(trunk) == {"repetition_penalty": 1.05}
    settings(tmp_path, {"do_sample": False, "repetition_penalty": 1.05})
    assert left_out(trunk) == {}


def test_the_recipe_knows_the_decoders_lowest_temperature() -> None:
    assert sections.MIN_TEMPERATURE == MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("written", "temperature"),
    [("0.0", (0.0,)), ("[0, 0.6]", (0.0, 0.6)), ("auto", "auto"), ("1", (1.0,))],
)
def test_a_value_a_list_or_auto(written: str, temperature: object) -> None:
    recipe = load_recipe(SMALLEST, [f"evaluate.temperature={written}"])
    assert recipe.evaluate.temperature == temperature
    assert load_recipe(SMALLEST, [f"evaluate.temperature={written}", "evaluate.top_k=auto"]) == recipe


@pytest.mark.parametrize("field", ["top_p=0.9", "top_k=20", "rule=sampled"])
def test_filters_need_a_temperature_to_filter(field: str) -> None:
    with pytest.raises(Exception, match=r"with evaluate\.temperature: 0; expected auto"):
        load_recipe(SMALLEST, ["evaluate.temperature=0", f"evaluate.{field}"])
    assert load_recipe(SMALLEST, ["evaluate.temperature=[0, 0.6]", f"evaluate.{field}"])
