"""A run on hidden states from a server of its trunk: the losses of a run that computes them, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from launching import head, metrics
from mtp_train.cli.main import main
from mtp_train.runs import trunks
from mtp_train.train import hidden_cache
from mtp_train.trunk.load import Trunk
from openai_server import Served
from runs import overrides_of, write_headless, write_inputs, write_recipe
from states_engine import StatesEngine, without_waits

UNJUDGED: dict[str, Any] = {
    "gate__enabled": False,
    "export__enabled": False,
    "evaluate__prompts": 1,
    "train__select": {"share": 0.3, "every_steps": 2},
}
EAGLE3 = {"model__head_from": None, "head__kind": "eagle3", "head__init": "random", "evaluate__arms": ["retrained"]}
ONCE, EPOCHS = 4, 8
"""Steps of less than an epoch, and of more."""
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Case(NamedTuple):
    """A trunk, a server of its states, and the recipe of a short run on it."""

    recipe: Path
    engine: StatesEngine
    expected: dict[int, Path]
    """The runs that compute the states themselves, by their steps."""

    def run(self, run_dir: Path, served: Served | None, **settings: Any) -> int:
        """Run the recipe on a server's states, if there is one, and return the exit code."""
        states = {} if served is None else {"train__states": {"endpoint": served.url, "concurrency": 3}}
        return main(["run", str(self.recipe), f"run_dir={run_dir}", *overrides_of(**states, **settings)])


def make_case(directory: Path, family_name: str) -> Case:
    settings = dict(UNJUDGED)
    layers = ()
    if family_name == "qwen3":
        write_headless(directory, family_name, num_layers=8)
        layers, settings = (2, 4, 5), settings | EAGLE3
    else:
        write_inputs(directory, family_name)
    recipe = write_recipe(directory / "recipe.yaml", directory, directory / "run", **settings)
    case = Case(recipe, StatesEngine(directory / "finetune", family_name, directory / "states", layers), {})
    for steps in (ONCE, EPOCHS):
        case.expected[steps] = directory / f"here{steps}"
        assert case.run(case.expected[steps], None, train__max_steps=steps) == 0
    return case

@pytest.fixture(scope="module", params=["qwen3_5", "glm4_moe", "qwen3"])
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("served") / "in", request.param)

def test_x(case, tmp_path, monkeypatch):
    monkeypatch.setattr(trunks, "load_trunk", None)
    without_waits(monkeypatch)
    with case.engine.serving() as served:
        for steps, cache in ((ONCE, None), (ONCE, {}), (EPOCHS, None)):
            run_dir = tmp_path / f"{steps}{cache}"
            assert case.run(run_dir, served, train__max_steps=steps, train__hidden_cache=cache) == 0
            for a, b in zip(metrics(run_dir), metrics(case.expected[steps])):
                print(a, b)
            print(case.engine.left, (run_dir/"hidden").exists(), (run_dir/"run.log").read_text() if (run_dir/"run.log").exists() else [p.name for p in run_dir.iterdir()])
