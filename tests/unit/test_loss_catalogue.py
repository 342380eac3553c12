"""A loss that another package registers is one that recipes can name, check and train with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from documents import random_documents
from mtp_train.data.pack import pack_documents
from mtp_train.errors import RecipeError
from mtp_train.losses import catalogue
from mtp_train.losses.catalogue import Loss, RowLoss, loss_names, register_loss
from mtp_train.losses.chunked import depth_weights
from mtp_train.losses.rows import log_probabilities
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.settings import plan_of
from mtp_train.runs.training import head_training
from mtp_train.train.loop import micro_batches, optimise
from mtp_train.trunk.states import TrunkStates
from runs import tiny_recipe
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


def recipe_with(**overrides: object) -> Recipe:
    settings = {"head__num_depths": 2, "data__seq_len_tokens": 16, "train__tokens_per_step": 32}
    return tiny_recipe(Path("anywhere"), Path("anywhere"), **{**settings, **overrides})


def test_a_head_learns_by_it(brier: str) -> None:
    used = recipe_with(objective__loss=brier, objective__temperature=2.0)
    sequences = pack_documents(random_documents((16, 16)), 16, pack=False, seed=0, epoch=0)
    trunk, plan = tiny_trunk("qwen3_5"), plan_of(used, 1)
    module = head_training(used, TrunkStates(trunk), tiny_head(trunk), None)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.accumulation)
    wrapped, optimizer = accelerator.prepare(module, torch.optim.Adam(module.head.parameters(), lr=1e-2))
    wrapped.train()
    totals = []
    for _ in range(12):
        weight_K = depth_weights(used.head.num_depths, used.objective.depth_decay)
        given = micro_batches(sequences, plan, weight_K, accelerator, module.states)
        (sums_K, *_), _ = optimise(wrapped, optimizer, accelerator, used.train.max_grad_norm, given)
        totals.append(float(sums_K.sum()))
    assert totals[-1] < 0.5 * totals[0]


def test_a_recipe_names_it_in_its_choices(brier: str) -> None:
    choices = "one of auto, ce, kl, reverse_kl, tv, lk, e2e_tv, brier"
    with pytest.raises(RecipeError, match=rf"^objective\.loss: 'brief'; expected {choices}\. Did you mean brier\?"):
        recipe_with(objective__loss="brief")


def test_a_name_belongs_to_one_loss(brier: str) -> None:
    register_loss(BRIER)
    before = loss_names()
    for name in ("auto", "kl", brier):
        with pytest.raises(ValueError, match=f"'{name}': the name of another loss"):
            register_loss(Loss(name, "elsewhere:rows"))
    assert loss_names() == before
