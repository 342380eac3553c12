"""The figures of a study: against engines' formulas, published arithmetic, and drafters whose acceptance is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from mtp_train.evaluation.prompt_records import PromptRecord, Setting
from mtp_train.evaluation.results import ALL_TASKS, Cell
from mtp_train.evaluation.statistics import (
    MeasuredArm,
    make_cells,
)
from simulated_drafters import DEPTH, decoded, decoded_of, dense_of, rounds_by_accepted

GREEDY = Setting(0.0, None, DEPTH, "greedy")


def arm(records: Sequence[PromptRecord], plain: Sequence[PromptRecord] = ()) -> MeasuredArm:
    without = MeasuredArm("none", "trunk", None, {GREEDY.plain: plain}, {GREEDY.plain: plain})
    return MeasuredArm("head", "trunk", "heads/head", {GREEDY: records}, {GREEDY: records}, plain=without)


def cell_of(records: Sequence[PromptRecord], plain: Sequence[PromptRecord] = ()) -> Cell:
    """Return the cell of all tasks."""
    return make_cells(arm(records, plain))[0]


@pytest.mark.parametrize(
    ("histogram", "marginal", "conditional", "tau"),
    [
        # FastMTP (arXiv:2509.18362): 81, 56 and 36 % with tau 2.73, and 70, 11 and 2 % with 1.83: marginal figures.
        ((19, 25, 20, 36), (0.81, 0.56, 0.36), (0.81, 0.691, 0.643), 2.73),
        ((30, 59, 9, 2), (0.70, 0.11, 0.02), (0.70, 0.157, 0.182), 1.83),
        # Qwen3-Next in the speculators repository: .873, .778 and .675, 2.01 accepted: conditional figures.
        ((127, 194, 221, 458), (0.873, 0.679, 0.458), (0.873, 0.778, 0.675), 3.01),
    ],
)
def test_published_figures_come_out(
    histogram: tuple[int, ...], marginal: tuple[float, ...], conditional: tuple[float, ...], tau: float
) -> None:
    cell = cell_of(decoded_of(np.array([histogram, histogram])))
    assert cell.marginal == pytest.approx(marginal, abs=5e-4)
    assert cell.conditional == pytest.approx(conditional, abs=1e-3)
    assert cell.tau == pytest.approx(tau, abs=5e-3)


def test_pooled_tau_weighs_rounds() -> None:
    cell = cell_of([decoded([3] * 9), decoded([0], "p1"), decoded([], "p2")])
    assert cell.tau == pytest.approx(1 + 27 / 10)
    assert cell.prompts == 3


def test_a_drafter_with_nothing_to_say() -> None:
    """Rounds without drafts commit one token all the same; only the rate of drafted tokens leaves them out."""
    silent = cell_of([decoded([0, 2, 0, 1], drafted=[0, 2, 0, 1]), decoded([0], "p1", drafted=[0])])
    assert silent.tau == pytest.approx(1 + 3 / 5)
    assert silent.acceptance_rate == 1.0
    assert silent.marginal == pytest.approx((0.4, 0.2, 0.0))
    assert silent.conditional == pytest.approx((0.4, 0.5, 0.0))
    never = cell_of([decoded([0, 0], drafted=[0, 0]), decoded([0], "p1", drafted=[0])])
    assert (never.tau, never.acceptance_rate, never.marginal) == (1.0, None, (0.0, 0.0, 0.0))
    assert never.conditional == (0.0, None, None)


def test_cells_by_task_add_up() -> None:
    rounds = rounds_by_accepted(np.random.default_rng(1), np.zeros((1, 6)))[0]
    cells = make_cells(arm(decoded_of(rounds, ("code", "prose")), decoded_of(rounds, ("code", "prose"))))
    assert [cell.task for cell in cells] == [ALL_TASKS, "code", "prose"]
    whole, *parts = cells
    for name in ("rounds", "draft_tokens", "accepted_tokens", "new_tokens", "prompts"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts) > 0
    assert {cell.depth for cell in cells} == {DEPTH}


def test_speed_is_that_of_the_same_prompts() -> None:
    """Twice as fast in rounds of 1.5 times the length."""
    drafted = [decoded([2] * 10, name, seconds=(1.0, 3.0)) for name in ("p0", "p1")]
    plain = [decoded([0] * 30, name, drafted=[0] * 30, seconds=(2.0, 6.0)) for name in ("p0", "p1")]
    cell = cell_of(drafted, plain)
    assert cell.tokens_per_second == pytest.approx(62 / 8)
    assert cell.speedup == pytest.approx(2.0)
    assert cell.seconds_prefill == pytest.approx(1.0)
    assert cell.round_seconds == pytest.approx(0.3)
    assert cell.break_even_tau == pytest.approx(1.5)
    assert (cell_of(drafted).speedup, cell_of(drafted).break_even_tau) == (None, None)


def test_plain_decoding_has_cells_of_its_own() -> None:
    records = [decoded([0] * 9, name, drafted=[0] * 9, num_tokens=10, seconds=(1.0, 1.8)) for name in ("p0", "p1")]
    dense = {(0.0, None): dense_of([np.full(4, 0.5)] * 2, [np.full(4, 0.9)] * 2)}
    (cell,) = make_cells(MeasuredArm("none", "trunk", None, {GREEDY.plain: records}, {GREEDY.plain: records}, dense))
    assert cell.task == ALL_TASKS
    assert (cell.head, cell.rule, cell.depth, cell.tau) == (None, "none", 0, 1.0)
    assert (cell.speedup, cell.round_seconds) == (1.0, pytest.approx(0.2))
    assert cell.target_entropy == pytest.approx(0.5)
    meaningless = "tau_ci95 acceptance_rate marginal marginal_ci95 conditional dense overlap break_even_tau"
    assert {name: getattr(cell, name) for name in meaningless.split()} == dict.fromkeys(meaningless.split())


def test_dense_figures_are_of_the_cells_task_and_depth() -> None:
    rows = dense_of([np.array([1.0, 2.0]), np.array([3.0])], [np.array([0.2, 0.4]), np.array([0.9])], ("code", "prose"))
    two = dataclasses.replace(
        rows,
        overlap_KN=np.concatenate([rows.overlap_KN, rows.overlap_KN / 2]),
        agreed_KN=np.array([[True, False, True], [False, False, False]]),
        valid_KN=np.array([[True, True, True], [False, True, False]]),
    )
    measured = dataclasses.replace(arm(decoded_of(np.ones((2, 4), int), ("code", "prose"))), dense={(0.0, None): two})
    whole, code, prose = make_cells(measured)
    assert (whole.overlap, whole.dense) == (pytest.approx((0.5, 0.2)), pytest.approx((2 / 3, 0.0)))
    assert (code.overlap, code.target_entropy) == (pytest.approx((0.3, 0.2)), pytest.approx(1.5))
    assert prose.overlap == (pytest.approx(0.9), None)
    shallow = Setting(0.0, None, 1, "greedy")
    cell = make_cells(dataclasses.replace(measured, decoded={shallow: measured.decoded[GREEDY]}))[0]
    assert cell.overlap == pytest.approx((0.5,))
