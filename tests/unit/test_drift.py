"""The drift curve: points of a fine-tune, saved checkpoints, and the state of the launch afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from accelerate.state import PartialState
from rich.progress import Progress

from mtp_train.data.tokenize import Document
from mtp_train.data.trainer_rows import IGNORED, document_row, pad_rows
from mtp_train.evaluation.cells import DriftPoint
from mtp_train.job.inputs import Inputs, gather_inputs
from mtp_train.job.study import drift
from mtp_train.job.study.drift import (
    DriftLog,
    alone,
    change_of,
    drift_along_checkpoints,
    drift_along_fine_tune,
    fine_tune,
    measured_steps,
    stored_change,
)
from mtp_train.recipe.schema import FineTuneSpec, Recipe
from mtp_train.trunk.load import Trunk
from mtp_train.weights.files import open_checkpoint
from products import Products
from runs import tiny_recipe, write_inputs
from tiny import tiny_trunk

QUIET = Progress(disable=True)
CPU = torch.device("cpu")
SPEC = FineTuneSpec(max_steps=4, lr=1e-2, documents_per_step=2, points=(0.1, 0.5, 1.0))
DOCUMENTS = [
    Document([1, 2, 3, 4, 5, 6], [False, False, True, True, True, True], "g", "a"),
    Document([7, 8, 9, 10], [False, True, True, True], "g", "b"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return tiny_recipe(write_inputs(tmp_path / "in", "glm4_moe"), tmp_path / "run")


@pytest.fixture
def inputs(recipe: Recipe) -> Inputs:
    return gather_inputs(recipe, 1, QUIET)


def learn(
    trunk: Trunk, documents: list[Document], spec: FineTuneSpec = SPEC, precision: str = "fp32"
) -> list[tuple[int, int]]:
    points: list[tuple[int, int]] = []
    steps: list[int] = []
    fine_tune(
        trunk,
        documents,
        spec,
        precision=precision,
        seed=0,
        on_step=steps.append,
        on_point=lambda step, tokens: points.append((step, tokens)),
    )
    assert steps == list(range(1, spec.max_steps + 1))
    return points


def test_points_are_whole_steps_from_before_the_first_to_the_last() -> None:
    assert measured_steps(FineTuneSpec(max_steps=100, lr=1.0)) == [0, 2, 5, 15, 40, 100]
    # The first step is the earliest, and shares that fall on one step are one point.
    assert measured_steps(FineTuneSpec(max_steps=3, lr=1.0)) == [0, 1, 3]


def test_fine_tuning_learns_what_it_is_shown_and_counts_its_tokens() -> None:
    trunk = tiny_trunk("glm4_moe")
    before = {name: value.clone() for name, value in trunk.named_parameters()}
    long = FineTuneSpec(max_steps=30, lr=2e-2, documents_per_step=2, points=(1.0,))
    loss_before = loss_of(trunk)
    assert learn(trunk, DOCUMENTS, long) == [(0, 0), (30, 300)]
    assert loss_of(trunk) < loss_before - 1.0
    assert change_of(trunk, before) > 0.01
    assert not trunk.training
    assert not any(parameter.requires_grad for parameter in trunk.parameters())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_all_products_of_a_fine_tune_are_in_its_precision(precision: str, dtype: torch.dtype) -> None:
    """The experts' too, which transformers' own function multiplies in the dtype of their weights."""
    with Products() as products:
        learn(tiny_trunk("glm4_moe"), DOCUMENTS, FineTuneSpec(max_steps=1, lr=1e-3, points=(1.0,)), precision)
    assert products.dtypes == {dtype}


@torch.no_grad()
def loss_of(trunk: Trunk) -> float:
    batch = pad_rows([document_row(document.input_ids, document.loss_mask) for document in DOCUMENTS])
    return float(trunk.causal_lm(**batch).loss)


def test_only_the_responses_tokens_are_learnt() -> None:
    batch = pad_rows([document_row(document.input_ids, document.loss_mask) for document in DOCUMENTS])
    assert batch["labels"].tolist() == [
        [IGNORED, IGNORED, 3, 4, 5, 6],
        [IGNORED, 8, 9, 10, IGNORED, IGNORED],
    ]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]


def test_a_launch_is_hidden_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    PartialState(cpu=True)
    PartialState._shared_state["num_processes_by_the_test"] = 2
    state, environment = dict(PartialState._shared_state), dict(os.environ)
    with alone():
        assert "RANK" not in os.environ
        assert "ACCELERATE_USE_FSDP" not in os.environ
        assert PartialState._shared_state == {}
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    assert dict(PartialState._shared_state) == state
    assert dict(os.environ) == environment


def test_the_curve_is_kept_point_by_point_and_not_drawn_twice(
    recipe: Recipe, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inputs.base is not None

    def draw(run_dir: Path) -> tuple[DriftPoint, ...]:
        assert inputs.base is not None
        return drift_along_fine_tune(recipe, SPEC, run_dir, inputs, inputs.base, DOCUMENTS, CPU, QUIET)

    points = draw(tmp_path)
    assert [(point.label, point.step) for point in points] == [
        ("step 0", 0),
        ("step 1", 1),
        ("step 2", 2),
        ("step 4", 4),
    ]
    assert points[0].trunk_change == 0.0
    changes = [point.trunk_change or 0.0 for point in points]
    assert changes == sorted(changes)
    assert changes[1] > 0
    assert [point.tokens for point in points] == [0, 10, 20, 40]
    assert all(point.overlap is not None and 0 < point.overlap < 1 for point in points)
    # Read, not drawn again.
    monkeypatch.setattr(drift, "fine_tune", lambda *_, **__: pytest.fail("drawn twice"))
    assert draw(tmp_path) == points


def test_a_curve_that_was_broken_off_is_drawn_from_its_start_and_ends_the_same(
    recipe: Recipe, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inputs.base is not None
    along = (inputs, inputs.base, DOCUMENTS, CPU, QUIET)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = drift_along_fine_tune(recipe, SPEC, tmp_path / "whole", *along)
    measure = drift.measure_point

    def killed(*args: object, **kwargs: object) -> DriftPoint:
        if kwargs["step"] == 2:
            raise KeyboardInterrupt
        return measure(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(drift, "measure_point", killed)
        with pytest.raises(KeyboardInterrupt):
            drift_along_fine_tune(recipe, SPEC, tmp_path / "killed", *along)
    assert [point.step for point in DriftLog(tmp_path / "killed").points] == [0, 1]
    assert drift_along_fine_tune(recipe, SPEC, tmp_path / "killed", *along) == whole


def test_checkpoints_are_measured_once_each_beside_the_base(
    recipe: Recipe, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inputs.base is not None
    checkpoints = {"late": inputs.finetune}
    points = drift_along_checkpoints(recipe, tmp_path, inputs, inputs.base, checkpoints, CPU, QUIET)
    assert [point.label for point in points] == [recipe.model.head_from, "late"]
    assert points[0].trunk_change == 0.0
    # The fine-tune's weights moved by 0.01 of noise on weights of 0.3.
    assert points[1].trunk_change == pytest.approx(0.01 / 0.3, rel=0.3)
    monkeypatch.setattr(drift, "load_trunk", lambda *_, **__: pytest.fail("measured twice"))
    assert drift_along_checkpoints(recipe, tmp_path, inputs, inputs.base, checkpoints, CPU, QUIET) == points


def test_change_on_disk_is_that_in_memory(tmp_path: Path) -> None:
    directory = write_inputs(tmp_path, "glm4_moe")
    base, moved = open_checkpoint(directory / "base"), open_checkpoint(directory / "finetune")
    assert stored_change(base, base) == 0.0
    assert stored_change(moved, base) > 0.0
