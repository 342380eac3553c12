from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp_train.errors import RecipeError
from mtp_train.recipe.loading import dump_recipe, load_recipe, recipe_from_mapping
from mtp_train.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "preserve_sft.yaml"
KEPT = ("sft={head: kept}", "evaluate.arms=[none, graft]")


def problems(*overrides: str) -> list[str]:
    """Return what the recipe is refused for; none where it loads."""
    try:
        load_recipe(RECIPE, overrides)
    except RecipeError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("override", "found"),
    [
        (
            "model.adapter=DIR",
            "model.adapter: 'DIR' with sft: the trunk is fine-tuned without an adapter",
        ),
        ("model.quantization=4bit", "model.quantization: '4bit' with sft: quantised weights cannot be trained"),
        ("model.offload=cpu", "model.offload: 'cpu' with sft: weights that are trained must be on the device"),
        ("head.kind=eagle", "head.kind: 'eagle' with sft: only an MTP head is stored in the trunk's own checkpoint"),
        ("head.lora={}", "head.lora: a section with sft: LoRA on the trunk is sft.lora; expected null."),
        ("head.draft_vocab=100", "head.draft_vocab: 100 with sft: the head drafts from all tokens; expected null."),
        ("head.convention=vllm", "head.convention: 'vllm' with sft"),
        ("head.init=random", "head.init: 'random' with sft, which keeps an existing head; expected native"),
        (
            "data.regenerate={}",
            "data.regenerate: a section with sft: the trunk is trained on the responses",
        ),
        ("data.pack=true", "data.pack: true with sft: transformers' Trainer has one document per row; expected false."),
        ("objective.loss=kl", "objective.loss: 'kl' with sft: the trunk is trained with cross-entropy"),
        (
            "objective.temperature=2.0",
            "objective.temperature: 2.0 with sft: no loss of a fine-tune has a",
        ),
        ("objective.unroll=fastmtp", "objective.unroll: 'fastmtp' with sft"),
        ("objective.on_policy=true", "objective.on_policy: true with sft"),
        ("train.hidden_cache={}", "train.hidden_cache: a section with sft: the trunk's hidden states change"),
        ("train.select={}", "train.select: a section with sft: the last checkpoint is kept; expected null."),
        ("gate.baseline=none", "gate.baseline: 'none' with sft"),
        ("export.enabled=false", "export.enabled: false with sft: the fine-tuned checkpoint is the output of the run"),
        (
            "study={}",
            "study: a section with sft: a run is either a study or a fine-tune; expected null.",
        ),
        ("evaluate.arms=[none, graft]", "evaluate.arms: no 'retrained' with sft.head: beside"),
        ("evaluate.arms=[none, retrained]", "evaluate.arms: no 'graft' with sft.head: beside"),
        ("evaluate.arms=[graft, retrained, native]", "evaluate.arms: 'native' with sft; expected 'graft'"),
        ("model.head_from=BASE", "model.head_from: 'BASE' with head.init: native, the head of model.trunk"),
        ("sft.steps=3", "sft.steps: unknown; expected one of lora, head, head_lr. Remove it."),
        ("sft.lora={r: 0}", "sft.lora.r: 0; expected a whole number of 1 or more."),
    ],
)
def test_what_a_fine_tune_has_no_use_for_is_refused(override: str, found: str) -> None:
    assert any(problem.startswith(found) for problem in problems(override)), problems(override)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (("objective.depth_decay=0.5",), "objective.depth_decay: 0.5 with sft.head: kept, which trains no head"),
        (("gate.confidence=0.9",), "gate.confidence: 0.9 with sft.head: kept"),
        (("sft.head_lr=1e-3",), "sft.head_lr: 0.001 with sft.head: kept, which trains no head; expected 0.0001."),
        (("evaluate.arms=[none, graft, retrained]",), "evaluate.arms: 'retrained' with sft.head: kept"),
    ],
)
def test_what_is_of_a_head_that_is_trained_is_refused_where_none_is(overrides: tuple[str, ...], found: str) -> None:
    assert any(problem.startswith(found) for problem in problems(*KEPT, *overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        KEPT,
        ("sft.lora={r: 8, targets: [q_proj]}",),
        ("head.init=graft", "model.head_from=BASE"),
        ("model.dtype=bfloat16", "train.gradient_checkpointing=true"),
        ("evaluate.arms=[graft, retrained]",),
    ],
)
def test_what_makes_sense_loads_and_survives_writing(overrides: tuple[str, ...], tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, overrides)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe.gate_baseline == "graft"


def plain(**sections: Any) -> Recipe:
    return recipe_from_mapping(
        {
            "run_dir": "runs/x",
            "model": {"trunk": "A", "head_from": "B"},
            "data": {"sources": [{"path": "x.jsonl"}]},
            "train": {"max_steps": 1, "tokens_per_step": 512, "lr": 1e-3},
            "evaluate": {"arms": ["none", "graft", "retrained"]},
            **sections,
        }
    )


def test_a_recipe_of_another_kind_has_its_own_baseline() -> None:
    assert plain().gate_baseline == "graft"
    assert (
        plain(head={"init": "native"}, evaluate={"arms": ["native", "retrained", "vanilla"]}).gate_baseline == "native"
    )
