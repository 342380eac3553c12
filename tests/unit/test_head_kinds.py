"""The kinds of heads that a recipe can name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.errors import RecipeError
from mtp_train.recipe.schema import Recipe
from runs import tiny_recipe


def recipe_with(**overrides: object) -> Recipe:
    return tiny_recipe(Path("anywhere"), Path("anywhere"), **{"head__init": "random", **overrides})


def test_a_kind_that_is_unknown_or_not_trained_is_refused() -> None:
    kinds = "mtp, eagle3, eagle, medusa, assistant, dflash, dflash2, dspark"
    with pytest.raises(RecipeError, match=rf"^head\.kind: 'toy'; expected one of {kinds}\."):
        recipe_with(head__kind="toy")
    with pytest.raises(RecipeError, match=r"kind: 'dflash', which can be decoded with and not trained"):
        recipe_with(head__kind="dflash")


def test_parallel_modules_are_one_for_each_depth() -> None:
    assert recipe_with(head__kind="medusa", head__num_depths=2).fresh_modules == 2
    with pytest.raises(RecipeError, match=r"evaluate\.depth: 3 with head\.kind: medusa"):
        recipe_with(head__kind="medusa", head__num_depths=2, evaluate__depth=3)
