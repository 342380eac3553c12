"""The kinds of heads: those that are built in, and one that another package registers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtp_train import head_kinds
from mtp_train.errors import RecipeError, UnsupportedModelError
from mtp_train.families import draft_kind, family_named, of_kind
from mtp_train.head_kinds import find_head_kind, register_head_kind
from mtp_train.recipe.schema import Recipe
from runs import tiny_recipe
from toy_kind import TOY


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the kind as another package would, for one test."""
    monkeypatch.setattr(head_kinds, "_KINDS", dict(head_kinds._KINDS))
    register_head_kind(TOY)
    return TOY.name


def recipe_with(**overrides: object) -> Recipe:
    return tiny_recipe(Path("anywhere"), Path("anywhere"), **{"head__init": "random", **overrides})


def test_a_recipe_names_a_registered_kind(toy: str) -> None:
    assert recipe_with(head__kind=toy).fresh_modules == 1
    with pytest.raises(RecipeError, match=r"^head\.kind: 'toi'; expected one of mtp, eagle, eagle3, medusa, toy\."):
        recipe_with(head__kind="toi")


def test_it_is_unknown_where_nobody_registered_it() -> None:
    with pytest.raises(RecipeError, match=r"^head\.kind: 'toy'; expected one of mtp, eagle, eagle3, medusa\."):
        recipe_with(head__kind="toy")
    with pytest.raises(UnsupportedModelError, match=r"^head\.kind: 'toy'; expected one of mtp, .* registers it first"):
        find_head_kind("toy")
    assert draft_kind({"architectures": ["ToyDraft"]}) is None


def test_its_draft_models_are_recognised(toy: str) -> None:
    assert draft_kind({"architectures": ["ToyDraft"]}) == TOY
    assert of_kind(family_named("qwen3"), toy).title == "Toy for Qwen3 dense"


def test_parallel_modules_follow_the_rules_of_medusa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_kinds, "_KINDS", dict(head_kinds._KINDS))
    register_head_kind(replace(TOY, name="flat", parallel=True))
    assert recipe_with(head__kind="flat", head__num_depths=2).fresh_modules == 2
    with pytest.raises(RecipeError, match=r"evaluate\.depth: 3 with head\.kind: flat and head\.num_depths: 2"):
        recipe_with(head__kind="flat", head__num_depths=2, evaluate__depth=3)
