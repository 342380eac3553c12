"""A loss that another package registers is one that recipes can name, check and train with."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_training import recipe, run_training
from torch import Tensor

from mtp_train.errors import RecipeError
from mtp_train.losses import catalogue
from mtp_train.losses.catalogue import Loss, RowLoss, loss_names, register_loss
from mtp_train.losses.rows import log_probabilities
from mtp_train.runs.training import head_training
from mtp_train.train.log import read_metrics
from mtp_train.trunk.states import TrunkStates
from tiny import tiny_head, tiny_trunk


def brier_rows(logits_CV: Tensor, teacher_logits_CV: Tensor, _targets: Tensor, temperature: float) -> RowLoss:
    """Return the squared error of the head's probabilities."""
    log_q_CV, log_p_CV = (log_probabilities(one, temperature) for one in (logits_CV, teacher_logits_CV))
    q_CV = log_q_CV.exp()
    gap_CV = q_CV - log_p_CV.exp()
    mean_C1 = (q_CV * 2 * gap_CV).sum(-1, keepdim=True)
    return RowLoss(gap_CV.square().sum(-1), q_CV * (2 * gap_CV - mean_C1) / temperature)


BRIER = Loss("brier", brier_rows)


@pytest.fixture
def brier(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the loss as another package would, for one test."""
    monkeypatch.setattr(catalogue, "_LOSSES", dict(catalogue._LOSSES))
    register_loss(BRIER)
    return BRIER.name


def test_a_head_learns_by_it(brier: str, tmp_path: Path) -> None:
    used = recipe(objective__loss=brier, objective__temperature=2.0, train__max_steps=12, train__lr=2e-2)
    trunk = tiny_trunk("qwen3_5")
    run_training(tmp_path, used, head_training(used, TrunkStates(trunk), tiny_head(trunk), None))
    lines = read_metrics(tmp_path)
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]


def test_a_recipe_names_it_in_its_choices(brier: str) -> None:
    choices = "one of auto, ce, kl, reverse_kl, tv, lk, e2e_tv, brier"
    with pytest.raises(RecipeError, match=rf"^objective\.loss: 'brief'; expected {choices}\. "):
        recipe(objective__loss="brief")


def test_a_name_belongs_to_one_loss(brier: str) -> None:
    register_loss(BRIER)
    before = loss_names()
    for name in ("auto", "kl", brier):
        with pytest.raises(ValueError, match=f"'{name}': the name of another loss"):
            register_loss(Loss(name, "elsewhere:rows"))
    assert loss_names() == before
