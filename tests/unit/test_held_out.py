"""Held out means held out, in the runs that users start: their text does not come back in training unnoticed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from documents import sentence
from json_files import write_rows
from mtp_train import check
from mtp_train.errors import DataError
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.inputs import Inputs, gather_inputs
from mtp_train.runs.pipeline import run_recipe
from mtp_train.runs.training import part_documents
from runs import tiny_recipe

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer briefly."}


def write_chats(directory: Path, rows: list[dict[str, Any]]) -> None:
    write_rows(directory / "chats.jsonl", rows)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return conversations of two exchanges, each stored once per exchange."""
    rows = []
    for number in range(count):
        turns = [
            {"role": role, "content": sentence(f"{role} {number} {turn}")}
            for turn in range(2)
            for role in ("user", "assistant")
        ]
        rows += [{"messages": [SYSTEM, *turns[:2]]}, {"messages": [SYSTEM, *turns]}]
    return rows


def gathered(recipe: Recipe) -> Inputs:
    return gather_inputs(recipe, 1, Progress(console=Console(quiet=True), disable=True), judges=True)


def by_content(directory: Path, run_dir: Path, **overrides: Any) -> Recipe:
    fields = {"data__group_field": None, "data__seq_len_tokens": 384, "train__tokens_per_step": 384}
    return tiny_recipe(directory, run_dir, **fields, **overrides)


def test_no_held_out_conversation_is_in_training(own_inputs: Path, tmp_path: Path) -> None:
    write_chats(own_inputs, conversations(40))
    select = {"every_steps": 2, "share": 0.3}
    recipe = by_content(own_inputs, tmp_path, evaluate__prompts=40, train__select=select)
    inputs = gathered(recipe)
    text = [inputs.tokenizer.decode(list(document.input_ids)) for document in inputs.text.documents]
    first_turns = {number: sentence(f"user {number} 0") for number in range(40)}
    held_out = {
        number
        for number, turn in first_turns.items()
        for prompt in inputs.text.held_out
        if turn in inputs.tokenizer.decode(list(prompt.prompt_ids))
    }
    assert len(held_out) > 5
    assert not [number for number in held_out if any(first_turns[number] in one for one in text)]
    # The text that heads are chosen by is split in the same way.
    training, measured = part_documents(recipe, inputs.text.documents)
    assert measured
    for turn in first_turns.values():
        in_training, in_measured = (any(turn in text[place] for place in places) for places in (training, measured))
        assert not (in_training and in_measured)


def few_groups(directory: Path, run_dir: Path, holdout: float) -> Recipe:
    return tiny_recipe(directory, run_dir, data__holdout=holdout, gate__confidence=0.97)


def test_too_few_groups_for_the_gate_are_refused_before_training(pristine: Path, new_run: Path) -> None:
    recipe = few_groups(pristine, new_run, 0.15)
    told = r"data\.holdout: 0\.15 gives .*; expected at least 6 groups, the fewest that can show a gain at gate\.conf"
    with pytest.raises(DataError, match=told):
        run_recipe(recipe, Console(quiet=True))
    assert not (new_run / "head").exists()


@pytest.mark.parametrize(
    ("field", "groups"),
    [(None, "by first user turn or file, near-duplicate prompts joined"), ("group", "by column 'group'")],
)
def test_check_tells_how_the_data_is_split(pristine: Path, new_run: Path, field: str | None, groups: str) -> None:
    used = {"data__group_field": field, "data__holdout": 0.6, "gate__confidence": 0.6}
    found = check(tiny_recipe(pristine, new_run, **used), processes=1)
    split = r"training on \d+ records in \d+ groups, \d+ records in \d+ groups held out; evaluating on \d+ prompts of"
    assert re.fullmatch(rf".*chats.jsonl; {split} \d+ groups; held out {groups}", found.to_json()["data"])
    assert f"\ntext: {found.data}\n" in str(found)
    assert not new_run.exists()


def test_check_plans_for_a_config_alone_and_says_that_it_read_no_data(
    pristine: Path, tmp_path: Path, new_run: Path
) -> None:
    recipe = few_groups(pristine, new_run, 0.5)
    (tmp_path / "config").mkdir()
    shutil.copy(Path(recipe.model.trunk) / "config.json", tmp_path / "config")
    source = recipe.data.sources[0].replaced({"path": "missing.jsonl"})
    recipe = recipe.replaced({"model.trunk": str(tmp_path / "config"), "data.sources": (source,)})
    found = check(recipe, processes=1)
    assert found.data is None
    assert "\ntext: not read, as the trunk has no tokenizer; a run refuses such a trunk\n" in str(found)
