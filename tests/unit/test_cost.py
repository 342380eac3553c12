"""Disk bytes of a run, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.runs.check import whole_disk
from mtp_train.runs.settings import plan_of
from mtp_train.train.plan import Footprint
from runs import tiny_recipe

HEAD = Footprint(
    trunk_parameters=0,
    head_parameters=12,
    trained_parameters=11,
    trunk_bytes=0,
    head_and_optimizer_bytes=0,
    loss_bytes=0,
    activation_bytes=0,
)


def test_disk_holds_three_resume_states_the_head_and_its_export(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, tmp_path / "run")
    # A resume state has three fp32 numbers for each trained weight; the head and its export have two bytes for each.
    assert whole_disk(recipe, plan_of(recipe, 1), 8, HEAD) == 11 * 3 * 12 + 12 * 2 * 2


@pytest.mark.parametrize(("dtype", "each"), [("auto", 4), ("bf16", 2), ("fp8", 1)])
def test_hidden_states_count_once_a_token_and_no_more_than_they_may(dtype: str, each: int, tmp_path: Path) -> None:
    used = tiny_recipe(tmp_path, tmp_path / "run", train__hidden_cache={"dtype": dtype})
    plan = plan_of(used, 1)
    without = whole_disk(tiny_recipe(tmp_path, tmp_path / "run"), plan, 8, HEAD)
    assert whole_disk(used, plan, 8, HEAD) == without + plan.total_tokens * 8 * each
    bounded = tiny_recipe(tmp_path, tmp_path / "run", train__hidden_cache={"dtype": dtype, "max_gib": 2.0**-20})
    assert whole_disk(bounded, plan, 8, HEAD) == without + 1024
