"""``objective.rows: triton`` is refused if its kernels cannot run, and selects them if they can."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress

from mtp_train import check
from mtp_train.errors import RecipeError
from mtp_train.job.inputs import gather_inputs
from mtp_train.job.training import head_training
from mtp_train.losses.rows import row_losses
from mtp_train.recipe.schema import Recipe
from runs import tiny_recipe
from tiny import tiny_head, tiny_trunk

Given = Callable[[str | None], None]


@pytest.fixture
def kernels_for(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Stand in for Triton on a machine with a device, or with none."""
    found = importlib.util.find_spec

    def given(device: str | None) -> None:
        there = SimpleNamespace(kernel_device=lambda: device)
        monkeypatch.setitem(sys.modules, "mtp_train.losses.triton_rows", there)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "triton" or found(name, *rest))

    return given


def gather(recipe: Recipe) -> None:
    with Progress(disable=True) as progress:
        gather_inputs(recipe, 1, progress)


GATES = pytest.mark.parametrize("gate", [lambda recipe: check(recipe, processes=1), gather], ids=["check", "run"])


@GATES
@pytest.mark.parametrize("device", [None, "cuda"])
def test_kernels_of_another_device_than_training_are_refused(
    gate: Callable[[Recipe], Any], device: str | None, kernels_for: Given, inputs: Path, tmp_path: Path
) -> None:
    kernels_for(device)
    gate(tiny_recipe(inputs, tmp_path / "run"))
    where = device or "no device"
    with pytest.raises(
        RecipeError, match=rf"^objective\.rows: 'triton', .* on {where} here, .* on cpu; expected a GPU"
    ):
        gate(tiny_recipe(inputs, tmp_path / "run", objective__rows="triton"))


@GATES
def test_kernels_of_the_device_that_trains_are_taken(
    gate: Callable[[Recipe], Any], kernels_for: Given, inputs: Path, tmp_path: Path
) -> None:
    kernels_for("cpu")
    recipe = tiny_recipe(inputs, tmp_path / "run", objective__rows="triton")
    gate(recipe)
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, inputs: Path, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else found(name, *rest)
    )
    with pytest.raises(
        RecipeError, match=r"^objective\.rows: 'triton', which is not installed; .* objective\.rows: torch"
    ):
        check(tiny_recipe(inputs, tmp_path / "run", objective__rows="triton"), processes=1)


def test_the_recipes_choice_makes_the_rows(monkeypatch: pytest.MonkeyPatch, inputs: Path, tmp_path: Path) -> None:
    asked: list[tuple[str, float]] = []

    def row_work(kind: Any, teacher_CV: torch.Tensor, temperature: float) -> Any:
        asked.append((kind, temperature))
        return lambda logits_CV, targets_C: row_losses(kind, logits_CV, teacher_CV, targets_C, temperature)

    monkeypatch.setitem(sys.modules, "mtp_train.losses.triton_rows", SimpleNamespace(row_work=row_work))
    losses = []
    for rows in ("torch", "triton"):
        settings = {"loss": "lk", "temperature": 2.0, "rows": rows}
        recipe = tiny_recipe(inputs, tmp_path, **{f"objective__{name}": value for name, value in settings.items()})
        trunk = tiny_trunk("qwen3_5", seed=1)
        module = head_training(recipe, trunk, tiny_head(trunk, seed=1), None)
        tokens_BT = torch.arange(12)[None]
        zeros_BT = torch.zeros_like(tokens_BT)
        terms = module(tokens_BT, tokens_BT, zeros_BT, zeros_BT == 0, torch.ones(2))
        losses.append(terms.total.item())
        assert asked == ([] if rows == "torch" else [("lk", 2.0)])
    assert losses[0] == losses[1]
