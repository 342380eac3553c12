"""Disk bytes of a run, by hand."""

from __future__ import annotations

from pathlib import Path

from mtp_train.data.tokenize import Prompt
from mtp_train.recipe.sections import RegenerateSpec
from mtp_train.runs.check import disk_bytes
from mtp_train.runs.inputs import RunText
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
    # A resume state has four fp32 numbers for each trained weight; the head and its export have two bytes for each.
    assert disk_bytes(recipe, HEAD, 120, 8) == 11 * 3 * 16 + 12 * 2 * 2


def test_hidden_states_count_once_a_token(tmp_path: Path) -> None:
    used = tiny_recipe(tmp_path, tmp_path / "run", train__hidden_cache={})
    text = RunText(
        documents=[], prompts=[Prompt(name, "g", (1,) * 40) for name in "abc"], held_out=[], split="", notes=[]
    )
    assert text.most_tokens(used) == 3 * 40
    answered = used.replaced({"data.regenerate": RegenerateSpec(max_new_tokens=50)})
    assert text.most_tokens(answered) == 3 * 90
    assert text.most_tokens(answered.replaced({"data.seq_len_tokens": 64})) == 3 * 64
    assert disk_bytes(used, HEAD, 120, 8) == disk_bytes(used, HEAD, 0, 8) + 120 * 8 * 4
