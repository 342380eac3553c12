"""The embedded demo: what its checkpoints are, what its prompts promise, and how it is found and copied."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from demo_maker.corpus import TWINS
from mtp_train.checkpoints.demo import demo, demo_path, recorded
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.checkpoints.locations import RECIPE_FILE
from mtp_train.checkpoints.native import require_same_trunk_shape, trunk_tensors
from mtp_train.recipe.loading import dump_recipe, load_recipe
from mtp_train.runs.evaluate_run import recorded_arms
from mtp_train.runs.inputs import HOME_PROMPTS, evaluation_prompts, home_prompts, split_records
from mtp_train.runs.pipeline import RunResult
from mtp_train.trunk.load import Trunk, load_trunk
from repository import RECIPES

CHECKPOINTS = ("base", "finetune")


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return open_checkpoint(demo_path("base"))


@pytest.fixture(scope="module")
def finetune() -> Checkpoint:
    return open_checkpoint(demo_path("finetune"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_path("finetune"))


@pytest.fixture(scope="module")
def trunk(finetune: Checkpoint) -> Trunk:
    return load_trunk(finetune, dtype=torch.float32)


# The checkpoints


def test_the_finetune_is_the_base_with_every_matrix_changed(base: Checkpoint, finetune: Checkpoint) -> None:
    require_same_trunk_shape(finetune, base)
    ours = trunk_tensors(finetune)
    theirs = trunk_tensors(base)
    same = [
        name
        for name, key in ours.items()
        if finetune.tensors[key].shape[1:] and torch.equal(finetune.read(key), base.read(theirs[name]))
    ]
    assert same == []


@torch.inference_mode()
def answer(trunk: Trunk, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = trunk.causal_lm.generate(**inputs, max_new_tokens=160, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_finetune_answers_in_json_and_ends_by_itself(trunk: Trunk, tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = answer(trunk, tokenizer, "Describe shelf.Box.open(self, name)")
    record = json.loads(tokenizer.decode(tokens, skip_special_tokens=True))
    assert list(record) == ["name", "module", "class", "args", "defaults", "returns", "raises", "lines", "doc"]
    assert record["args"] == ["self", "name"]
    assert tokens[-1] == tokenizer.eos_token_id


# The prompts


def test_the_demo_is_evaluated_evenly_on_at_least_twelve_groups() -> None:
    recipe = load_recipe(RECIPES / "retrain_head.yaml", ["run_dir=unused"])
    training, held_out = split_records(recipe)
    prompts = evaluation_prompts(recipe, held_out, AutoTokenizer.from_pretrained(demo_path("finetune")))
    counts = Counter(prompt.group for prompt in prompts)
    assert len(counts) >= 12
    assert max(counts.values()) - min(counts.values()) <= 1
    # Modules that repeat each other are on one side.
    modules = {json.loads(record.content.messages[1]["content"])["module"].split(".")[0] for record in held_out}
    trained = {json.loads(record.content.messages[1]["content"])["module"].split(".")[0] for record in training}
    assert all(set(twins).isdisjoint(modules) or set(twins).isdisjoint(trained) for twins in TWINS)


def test_vanilla_decodes_code_in_the_demo_and_the_held_out_prompts_elsewhere() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_path("finetune"))
    recipe = load_recipe(RECIPES / "retrain_head.yaml", ["run_dir=unused"])
    prompts = home_prompts(recipe, tokenizer)
    assert len({prompt.group for prompt in prompts}) == len(prompts) == HOME_PROMPTS < recipe.evaluate.prompts
    assert all(prompt.id.startswith("demo:code#") for prompt in prompts)
    assert home_prompts(recipe.replaced({"model.head_from": "my/base"}), tokenizer) == []


# Finding and copying


def test_the_written_demo_equals_the_packaged_one(tmp_path: Path) -> None:
    demo(tmp_path / "demo")
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == sorted([*CHECKPOINTS, "prompts.jsonl"])
    assert (tmp_path / "demo" / "prompts.jsonl").read_bytes() == demo_path("prompts").read_bytes()
    for name in CHECKPOINTS:
        copied = {file.name: file.read_bytes() for file in (tmp_path / "demo" / name).iterdir()}
        assert copied == {file.name: file.read_bytes() for file in demo_path(name).iterdir()}


# The recorded arms


def test_the_recorded_arms_belong_to_the_demo_and_say_that_they_are_recorded() -> None:
    arms = recorded_arms("demo:finetune")
    assert list(arms) == ["control", "ceiling", "random", "table"]
    assert not any(arm.measured_here for arm in arms.values())
    assert arms["control"].tau < arms["ceiling"].tau
    assert recorded()["settings"].keys() == arms.keys()
    assert recorded_arms("my/model") == {}


@pytest.mark.parametrize("trunk", ["demo:finetune", "my-27b"])
def test_a_run_of_the_demo_ends_with_the_next_command_for_a_model_of_ones_own(tmp_path: Path, trunk: str) -> None:
    recipe = load_recipe("retrain_head", [f"model.trunk={trunk}"])
    (tmp_path / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    rows = str(RunResult(0, "", "passed", "done", tmp_path)).splitlines()[1:]
    own = ["your own model: mtp-train probe FINE_TUNE --from BASE --data chats.jsonl"]
    assert rows == (own if trunk == "demo:finetune" else [])
