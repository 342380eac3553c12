"""What a job takes from its machine follows from features and sizes, is recorded, and is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.errors import OutputExistsError
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import pipeline
from mtp_train.runs.run import Run
from mtp_train.train import machine
from mtp_train.train.machine import threads_are_set, use_threads
from runs import tiny_recipe, write_inputs

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"MKL_NUM_THREADS": "2"}, True),
        ({"OMP_NUM_THREADS": "1"} | LAUNCHED, False),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, False),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | LAUNCHED, True),
        ({"OMP_NUM_THREADS": "2"} | LAUNCHED, True),
    ],
)
def test_a_launcher_s_default_number_of_threads_is_nobody_s_wish(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *LAUNCHED, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert threads_are_set() is expected


def test_threads_are_set_once_nobody_has_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert use_threads({"hidden_size": 4096}) == "2 thread(s) of 2 core(s)"
    assert torch.get_num_threads() == 2
    assert use_threads({"hidden_size": 128}) == "1 thread(s) of 2 core(s)"
    assert use_threads({"hidden_size": 128}, rows=1536) == "2 thread(s) of 2 core(s)"
    # A config that is wrong is for whoever opens the trunk to refuse.
    assert use_threads({"hidden_size": "wide"}) == "1 thread(s) of 2 core(s)"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_threads({"hidden_size": 4096}) == "1 thread(s), as set"
    assert torch.get_num_threads() == 1


def resolve_as(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    # Only the choice in a recipe is tested: nothing is multiplied.
    support = (native, "this CPU is a stand-in")
    monkeypatch.setattr("mtp_train.trunk.precision.bf16_support", lambda _device: support)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Stand in for a run's stages: claim the directory, then stop as a kill would."""
    seen: list[Recipe] = []

    def stand_in(run: Run, *_rest: Any) -> None:
        seen.append(run.recipe)
        run.claim()
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run_stages", stand_in)
    return seen


def run_once(recipe: Recipe) -> None:
    with pytest.raises(KeyboardInterrupt):
        pipeline.run_recipe(recipe, Console(quiet=True))


def test_the_resolved_precision_is_recorded_and_kept_on_another_machine(
    stages: list[Recipe], tmp_path: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(write_inputs(tmp_path / "in"), new_run, train__precision="auto")
    for native in (False, True):
        resolve_as(monkeypatch, native)
        run_once(recipe)
        assert stages[-1].train.precision == "fp32"
        assert load_recipe(new_run / RECIPE_FILE).train.precision == "fp32"
    # The control: a directory of its own is begun in what this machine has.
    run_once(tiny_recipe(tmp_path / "in", tmp_path / "other", train__precision="auto"))
    assert stages[-1].train.precision == "bf16"
    # What is named is another recipe.
    with pytest.raises(OutputExistsError):
        pipeline.run_recipe(tiny_recipe(tmp_path / "in", new_run, train__precision="bf16"), Console(quiet=True))
