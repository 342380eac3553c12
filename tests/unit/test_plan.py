from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import RecipeError
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.settings import plan_of, train_options
from runs import tiny_recipe

PLACE = Path("anywhere")


def recipe(**train: Any) -> Recipe:
    return tiny_recipe(PLACE, PLACE, **{f"train__{name}": value for name, value in train.items()})


@pytest.mark.parametrize(
    ("world_size", "micro_batch_sequences", "accumulation"), [(1, 1, 12), (1, 4, 3), (2, 3, 2), (3, 2, 2), (12, 1, 1)]
)
def test_a_step_is_the_same_sequences_however_it_is_shared_out(
    world_size: int, micro_batch_sequences: int, accumulation: int
) -> None:
    plan = plan_of(recipe(tokens_per_step=12 * 96, micro_batch_sequences=micro_batch_sequences), world_size)
    assert (plan.sequences_per_step, plan.accumulation) == (12, accumulation)
    sequences = list(range(12))
    taken = [
        sequences[plan.share(micro, rank)] for micro in range(plan.accumulation) for rank in range(plan.world_size)
    ]
    assert {len(share) for share in taken} == {micro_batch_sequences}
    assert sorted(index for share in taken for index in share) == sequences


@pytest.mark.parametrize(
    ("sequences", "world_size", "micro"), [(12, 5, 1), (12, 8, 1), (2, 4, 1), (12, 4, 2), (2, 3, 2)]
)
def test_a_step_that_does_not_divide_is_refused_with_values_that_do(
    sequences: int, world_size: int, micro: int
) -> None:
    refused = recipe(tokens_per_step=sequences * 96, micro_batch_sequences=micro)
    with pytest.raises(RecipeError, match=r"train\.tokens_per_step: .* expected a multiple of") as caught:
        plan_of(refused, world_size)
    written = re.search(r"Write (\d+) or (\d+)\.", str(caught.value))
    assert written is not None
    for value in map(int, written.groups()):
        assert plan_of(recipe(tokens_per_step=value, micro_batch_sequences=micro), world_size).accumulation >= 1


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "expected"),
    [
        ("constant", 0, [8.0] * 6),
        ("constant", 4, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        ("cosine", 0, [8.0, 7.464102, 6.0, 4.0, 2.0, 0.535898]),
        ("cosine", 2, [4.0, 8.0, 8.0, 6.828427, 4.0, 1.171573]),
        ("cosine", 5, [1.6, 3.2, 4.8, 6.4, 8.0, 8.0]),
    ],
)
def test_learning_rates_by_hand(schedule: str, warmup_steps: int, expected: list[float]) -> None:
    planned = recipe(lr=8.0, max_steps=6, schedule=schedule, warmup_steps=warmup_steps)
    assert [train_options(planned).lr_at(step) for step in range(6)] == pytest.approx(expected)
