"""Settings that are ``auto``: the rules on models and data of different sizes, and what a recipe may leave to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_tokenizer import CHATML, byte_tokenizer
from checkpoints import base_and_finetune
from json_files import write_rows
from mtp_train import check
from mtp_train.data.records import text_group
from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError
from mtp_train.recipe.loading import apply_override
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import AUTOMATIC, LoraSection
from mtp_train.runs import resolve
from mtp_train.runs.resolve import (
    EPOCHS,
    FROM_TEXT,
    MOST_EPOCHS,
    Choice,
    Lengths,
    ModelFacts,
    TextFacts,
    automatic_values,
    lr_choice,
    recipe_of,
    resolve_training,
    resolved_recipe,
)
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.train.machine import Device, device_named
from runs import BYTE_VOCAB_SIZE, tiny_mapping, tiny_recipe

HERE = device_named(None)
# A 27B model on one GPU of 80 GB: what is left beside the weights.
LARGE = ModelFacts(
    hidden_size=5120,
    max_positions=262_144,
    cache_bytes=64 * 2 * 4 * 256 * 2,
    device="cuda",
    spare_bytes=26 << 30,
    sharded_bytes=26 << 30,
    world_size=1,
)
DEMO = ModelFacts(
    hidden_size=128,
    max_positions=4096,
    cache_bytes=8 * 2 * 2 * 32 * 4,
    device="cpu",
    spare_bytes=8 << 30,
    sharded_bytes=8 << 30,
    world_size=1,
)


def in_groups(num_records: int, num_groups: int) -> dict[str, int]:
    """Records spread over groups, the first of which get one more."""
    least, more = divmod(num_records, num_groups)
    return {f"group {number}": least + (number < more) for number in range(num_groups)}


CHATS = TextFacts(
    groups=in_groups(50_000, 40_000),
    prompt=Lengths(120.0, 700),
    response=Lengths(400.0, 900),
    whole=Lengths(520.0, 1500),
)
FEW = CHATS._replace(groups=in_groups(100, 100), prompt=Lengths(30.0, 60), response=None)


def resolved(monkeypatch: pytest.MonkeyPatch, model: ModelFacts, text: TextFacts, **overrides: Any) -> dict[str, Any]:
    """Return the value of every field by the rules."""
    monkeypatch.setattr(resolve, "model_facts", lambda recipe, world_size, device: model)
    monkeypatch.setattr(resolve, "text_facts", lambda recipe: text)
    recipe = tiny_recipe(Path("nowhere"), Path("nowhere/run"), data__regenerate={}, **overrides)
    return {choice.field: choice.value for choice in automatic_values(recipe, AUTOMATIC, model.world_size, HERE)}


def test_a_large_model_with_many_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(monkeypatch, LARGE, CHATS) == {
        "data.holdout": 0.05,
        "evaluate.prompts": 64,
        "data.regenerate.max_prompts": 20_000,
        # Twice 900 is above the most.
        "data.regenerate.max_new_tokens": 1024,
        # 700 + 1024 tokens.
        "data.seq_len_tokens": 2048,
        # 0.3 of 26 GiB by 2048 tokens of 256 KiB.
        "data.regenerate.batch_size": 15,
        "train.lr": pytest.approx(8e-5),
        "train.tokens_per_step": 65_536,
        # 20000 x 520 tokens are 158.7 steps per pass.
        "train.max_steps": 477,
        "train.micro_batch_sequences": 4,
        "train.warmup_steps": 24,
    }


SWITCHED = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{{ '<no_think>' if enable_thinking is false }}{% endif %}"
)
"""A template whose generation prompt is not how it opens the turn in the history, where thinking is switched off."""


def test_answers_of_the_trunk_need_no_template_for_the_records_own(own_inputs: Path) -> None:
    """As a column of the records, and for all of them; only the prompt is rendered, as the trunk is asked."""
    for path in (own_inputs / "finetune", own_inputs / "base"):
        byte_tokenizer(SWITCHED).save_pretrained(path)
    off = {"data__chat_template_kwargs": {"enable_thinking": False}, "train__lr": "auto"}
    answered = {"data__regenerate": {"max_new_tokens": "auto", "max_prompts": 4}, "data__seq_len_tokens": 192}
    with pytest.raises(DataError, match=r"after the prompt for it; .*Add 'data\.regenerate=\{\}'"):
        recipe_of(tiny_mapping(own_inputs, own_inputs / "run", **off))
    found = check(tiny_mapping(own_inputs, own_inputs / "run", **off, **answered))
    assert found.data is not None
    assert "answers of the trunk to 4 prompts" in found.data
    assert "no response of a record is known" in str([one.reason for one in found.choices])


def test_a_small_model_with_few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolved(monkeypatch, DEMO, FEW)
    # Each group is held out by its name: 27 of the 30 that were aimed at.
    assert (found["data.holdout"], found["evaluate.prompts"]) == (0.3, 27)
    assert found["data.regenerate.max_prompts"] == 73
    # No responses to go by, and half of the positions would be more.
    assert found["data.regenerate.max_new_tokens"] == 1024
    assert found["data.seq_len_tokens"] == 2048
    assert found["data.regenerate.batch_size"] == 64
    assert found["train.lr"] == pytest.approx(3.2e-3)
    # At most 73 x (30 + 1024) tokens, in steps of four sequences: 9 steps per pass.
    assert found["train.tokens_per_step"] == 8192
    assert found["train.max_steps"] == 94
    assert found["train.micro_batch_sequences"] == 1


def test_the_counts_of_a_plan_are_those_of_the_run(inputs: Path, tmp_path: Path, new_run: Path) -> None:
    # Near-duplicates: 40 records in fewer groups than prompts.
    rows = [{"prompt": f"{'list the primes from ' * 9}{number % 25}", "response": "no"} for number in range(40)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    sources = [{"path": str(tmp_path / "pairs.jsonl")}]
    found = check(mapping(inputs, new_run, data__sources=sources, data__group_field=None), processes=1)
    told = re.search(
        r"answers of the trunk to (\d+) prompts of .*; training on (\d+) records in (\d+) groups, (\d+) records in "
        r"(\d+) groups held out; evaluating on (\d+) prompts of (\d+) groups",
        found.data or "",
    )
    assert told is not None, found.data
    prompts, records, groups, held_out, held_groups, evaluated, _ = map(int, told.groups())
    chosen = found.to_json()["auto"]
    assert chosen["data.regenerate.max_prompts"]["value"] == prompts == records
    assert chosen["evaluate.prompts"]["value"] == held_out == evaluated
    assert chosen["data.holdout"]["reason"].startswith(
        f"aims at 64 records in 12 groups, of {records + held_out} in {groups + held_groups};"
    )
    assert "\nsteps: about " in str(found)


def test_few_groups_are_held_out_enough_for_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolved(monkeypatch, DEMO, CHATS._replace(groups=in_groups(50_000, 80)))
    assert (found["data.holdout"], found["data.regenerate.max_prompts"]) == (0.15, 20_000)
    assert resolved(monkeypatch, DEMO, CHATS._replace(groups=in_groups(50_000, 40)))["data.holdout"] == 0.3
    # 5 groups are the fewest that show a gain; those of very little data are held out by a larger chance.
    assert resolved(monkeypatch, DEMO, CHATS._replace(groups=in_groups(50_000, 25)))["data.holdout"] == 0.4
    assert resolved(monkeypatch, DEMO, CHATS._replace(groups=in_groups(50_000, 3)))["data.holdout"] == 0.5


def settled(recipe: Recipe, choices: Sequence[Choice]) -> Recipe:
    """Return a recipe with the length of training that was chosen for it."""
    assert {choice.field for choice in choices} == set(FROM_TEXT)
    return recipe.replaced({choice.field: choice.value for choice in choices})


@pytest.mark.parametrize("seq_len", [512, 4096])
@pytest.mark.parametrize("tokens", [600, 200_000, 400_000_000])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_text_is_repeated_only_as_often_as_the_rules_allow(
    monkeypatch: pytest.MonkeyPatch, tokens: int, seq_len: int, world_size: int
) -> None:
    monkeypatch.setattr(resolve, "model_facts", lambda recipe, world, device: LARGE._replace(world_size=world))
    recipe = tiny_recipe(
        Path("nowhere"), Path("nowhere/run"), data__seq_len_tokens=seq_len, train__tokens_per_step=seq_len
    )
    text = Document(np.zeros(tokens, dtype=np.int64), np.ones(tokens, dtype=np.bool_), "d", "g")
    train = settled(recipe, resolve_training(recipe, FROM_TEXT, [text], world_size)).train
    passes = train.max_steps * train.tokens_per_step / tokens
    # The last step may go beyond.
    slack = train.tokens_per_step / tokens
    assert EPOCHS <= passes <= max(MOST_EPOCHS, EPOCHS) + slack
    sequences = train.tokens_per_step // seq_len
    assert sequences % (train.micro_batch_sequences * world_size) == 0
    new = recipe.replaced({"head.init": "random"})
    twice = settled(new, resolve_training(new, FROM_TEXT, [text], world_size))
    assert twice.train.max_steps == pytest.approx(2 * train.max_steps, abs=2)


def test_nothing_fits_beside_a_trunk_that_does_not(inputs: Path, new_run: Path) -> None:
    small = Device("small", "cuda", 1 << 10)
    _, choices = resolved_recipe(mapping(inputs, new_run), device=small)
    reasons = {choice.field: (choice.value, choice.reason) for choice in choices}
    assert reasons["data.regenerate.batch_size"] == (1, "the trunk itself does not fit on a process")
    assert reasons["train.micro_batch_sequences"] == (1, "no activations fit beside the trunk")


def mapping(inputs: Path, run_dir: Path, **overrides: Any) -> dict[str, Any]:
    plain = tiny_mapping(inputs, run_dir, data__regenerate={}, **overrides)
    for field in AUTOMATIC:
        if field != "train.lr":
            apply_override(plain, f"{field}=auto")
    return plain


def test_a_recipe_leaves_fields_to_the_rules_and_keeps_those_of_the_user(inputs: Path, new_run: Path) -> None:
    found, choices = resolved_recipe(mapping(inputs, new_run), ["evaluate.prompts=5"])
    assert found.evaluate.prompts == 5
    assert found.train.lr == 1e-3
    assert {choice.field for choice in choices} == set(AUTOMATIC) - {"train.lr", "evaluate.prompts"}
    assert all(choice.reason for choice in choices)
    assert found == recipe_of(mapping(inputs, new_run), ["evaluate.prompts=5"])


def test_a_resumed_run_keeps_what_it_recorded(inputs: Path, tmp_path: Path, new_run: Path) -> None:
    before, _ = resolved_recipe(mapping(inputs, new_run))
    recorded = before.replaced({"train.max_steps": 77})
    RunDirectory(new_run).path.mkdir()
    RunDirectory(new_run).record_recipe(recorded)
    again, choices = resolved_recipe(mapping(inputs, new_run))
    assert again == recorded
    assert Choice("train.max_steps", 77, f"recorded in {new_run}") in choices
    elsewhere, _ = resolved_recipe(mapping(inputs, tmp_path / "other"))
    assert elsewhere.train == before.train


def test_a_head_that_drafts_well_before_training_gets_a_fifth_of_the_rate() -> None:
    recipe = tiny_recipe(Path("nowhere"), Path("nowhere/run"))
    rule = lr_choice(recipe, 128).value
    assert rule == pytest.approx(3.2e-3)
    assert [lr_choice(recipe, 128, overlap).value for overlap in (0.05, 0.79, 0.8)] == [rule, rule, rule / 5]
    on_lora = recipe.replaced({"head.lora": LoraSection()})
    assert lr_choice(on_lora, 128, 0.85).value == pytest.approx(2 * rule)


def test_a_step_is_of_whole_micro_batches(inputs: Path, new_run: Path) -> None:
    asked = {"train.tokens_per_step": "auto", "train.micro_batch_sequences": 3, "data.seq_len_tokens": 1024}
    found = recipe_of(mapping(inputs, new_run), asked).train
    assert found.tokens_per_step % (3 * 1024) == 0


def test_lengths_are_counted_in_tokens(tmp_path: Path, new_run: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5", vocab_size=BYTE_VOCAB_SIZE)
    byte_tokenizer().save_pretrained(base)
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "abcd", "response": "ef"}\n' * 3 + '{"prompt": "a", "response": ""}\n'
    )
    mapped = tiny_mapping(
        tmp_path, new_run, data__group_field=None, data__sources=[{"path": str(tmp_path / "pairs.jsonl")}]
    )
    mapped["model"]["trunk"] = str(base)
    mapped["gate"] = {"enabled": False}
    facts = resolve.text_facts(recipe_of(mapped))
    # With the end-of-text token; the record without a response counts as a prompt only.
    assert facts == TextFacts(
        groups={text_group("abcd"): 3, text_group("a"): 1},
        prompt=Lengths(13 / 4, 4),
        response=Lengths(3.0, 3),
        whole=Lengths(7.0, 7),
    )
