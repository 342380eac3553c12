"""LoRA on the head: the parameters that are trained, saved and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_training import recipe, run_training, training_module

from checkpoints import same
from mtp_train.errors import RecipeError
from mtp_train.heads.lora import is_lora, put_on_lora, require_lora_targets
from mtp_train.recipe.sections import LoraSection
from mtp_train.train.head_training import HeadTraining
from tiny import num_released_modules, tiny_head, tiny_trunk

WITH_EXPERTS = "glm4_moe"


def test_only_the_layers_that_are_named_are_adapted() -> None:
    head = tiny_head(tiny_trunk(WITH_EXPERTS))
    put_on_lora(head, LoraSection(r=2, targets=("q_proj", "gate_up_proj")), seed=0)
    adapted = {name.partition(".lora_")[0] for name, value in head.named_parameters() if value.requires_grad}
    assert adapted == {"blocks.0.layer.self_attn.q_proj", "blocks.0.layer.mlp.experts"}


def test_a_layer_that_is_not_there_is_named_before_anything_is_built() -> None:
    trunk = tiny_trunk("qwen3_5")
    with pytest.raises(RecipeError, match=r"head\.lora\.targets\.1: 'qproj'; expected a layer of the head: down_proj,"):
        require_lora_targets(LoraSection(targets=("q_proj", "qproj")), *shape_of("qwen3_5"))
    assert require_lora_targets(LoraSection(targets=None), *shape_of("qwen3_5"))
    put_on_lora(head := tiny_head(trunk), LoraSection(r=3), seed=0)
    trained = sum(value.numel() for value in head.parameters() if value.requires_grad)
    assert require_lora_targets(LoraSection(r=3), *shape_of("qwen3_5")) == trained


def shape_of(family_name: str) -> tuple[Any, ...]:
    trunk = tiny_trunk(family_name)
    return trunk.family, trunk.config, num_released_modules(trunk), trunk.family.wiring.default


def test_the_start_follows_the_seed_and_leaves_other_random_numbers_alone() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(9)
        put_on_lora(head := tiny_head(tiny_trunk("qwen3_5")), LoraSection(), seed=seed)
        found.append((head.state_dict()["blocks.0.proj.lora_A.default.weight"], torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    assert found[0][1] == found[2][1]


def adapted() -> HeadTraining:
    module = training_module(WITH_EXPERTS)
    put_on_lora(module.head, LoraSection(r=4), seed=0)
    return module


def test_a_killed_run_ends_with_the_matrices_of_an_unbroken_one(tmp_path: Path) -> None:
    used = recipe(train__max_steps=5, train__save_steps=2, train__micro_batch_sequences=2, train__lr=1e-2)
    expected = run_training(tmp_path / "unbroken", used, adapted())
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path / "killed", used, adapted(), stop_after=3)
    (state,) = (tmp_path / "killed" / "state").iterdir()
    for file in ("head.safetensors", "optimizer.safetensors"):
        held = load_file(state / file)
        assert held
        assert all(is_lora(name) for name in held)
    found = run_training(tmp_path / "killed", used, adapted())
    assert same(found, expected)
    assert any(value.any() for name, value in found.items() if ".lora_B." in name)
