"""Sizes and rules of trunks that several processes share, and the refusal of trunks that they cannot share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import save_stripped
from mtp_train.errors import RecipeError, TrainingError, UnsupportedModelError
from mtp_train.job.decoding_group import fitting_size, keeps_whole, require_size, require_splittable
from mtp_train.recipe.loading import recipe_from_mapping
from mtp_train.trunk.tensor_parallel import cuts_anything, group_sizes, part_bytes, smallest_fitting, split_rules
from mtp_train.upstream.transformers_private import splits_models
from mtp_train.weights.files import open_checkpoint
from runs import tiny_mapping
from tiny import ALL_FAMILIES, tiny_trunk

needs_splitting = pytest.mark.skipif(not splits_models(), reason="transformers cannot load a part of a model")


@pytest.mark.parametrize(
    ("processes", "per_node", "sizes"),
    [(1, 1, [1]), (2, 2, [1, 2]), (8, 8, [1, 2, 4, 8]), (6, 6, [1, 2, 3, 6]), (16, 8, [1, 2, 4, 8, 16])],
)
def test_groups_divide_the_processes(processes: int, per_node: int, sizes: list[int]) -> None:
    assert group_sizes(processes, per_node) == sizes


def test_groups_do_not_cross_nodes_in_parts() -> None:
    """Three of eight processes a node would be two nodes' now and then."""
    assert group_sizes(24, 8) == [1, 2, 4, 8, 24]


def test_the_smallest_group_that_fits_is_taken() -> None:
    def bytes_of(size: int) -> int:
        return 10 + 80 // size

    assert [smallest_fitting([1, 2, 4], bytes_of, room) for room in (90, 89, 50, 49, 1)] == [1, 2, 2, 4, 4]


def test_a_trunk_beside_its_heads_needs_more_processes() -> None:
    trunk = tiny_trunk("llama")
    whole = part_bytes(trunk.causal_lm, 4, 1)
    assert whole == 4 * sum(parameter.numel() for parameter in trunk.parameters())
    room = int(whole / 0.85) + 1
    assert fitting_size(trunk, 4, 0, 8, room) == 1
    assert fitting_size(trunk, 4, whole // 4, 8, room) == 2


@needs_splitting
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_heads_find_embedding_and_output_matrix_whole(name: str) -> None:
    model: Any = tiny_trunk(name).causal_lm
    rules = split_rules(model)
    assert not any(rule in ("colwise", "rowwise") for rule in rules.values())
    plan = {**(model.tp_plan or {}), **rules}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        (path,) = {path for path, one in model.named_modules() if one is module}
        assert plan.get(path, "replicate") == "replicate"


def test_experts_and_attention_are_cut() -> None:
    model = tiny_trunk("qwen3_5_moe").causal_lm
    cut = part_bytes(model, 1, 1) - part_bytes(model, 1, 2)
    layers = sum(one.numel() for path, one in model.named_parameters() if ".layers." in path)
    assert 0.45 * layers < cut <= 0.5 * layers


def test_a_size_that_does_not_divide_the_processes_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"tensor_parallel: 3, with 8 process\(es\); expected one of 1, 2, 4, 8"):
        require_size(3, 8)
    require_size(4, 8)


@needs_splitting
@pytest.mark.parametrize("name", [one for one in ("gpt_oss", "step3p7", "inkling") if one in ALL_FAMILIES])
def test_a_trunk_without_a_usable_plan_is_refused(name: str, tmp_path: Path) -> None:
    trunk = tiny_trunk(name)
    checkpoint = open_checkpoint(save_stripped(trunk, tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"no usable tensor-parallel plan.*model\.offload: cpu"):
        require_splittable(checkpoint, trunk)


@needs_splitting
def test_a_quantised_trunk_is_refused_and_a_plain_one_is_not(tmp_path: Path) -> None:
    trunk = tiny_trunk("llama")
    checkpoint = open_checkpoint(save_stripped(trunk, tmp_path))
    require_splittable(checkpoint, trunk)
    assert cuts_anything(trunk.causal_lm)
    checkpoint.config["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(TrainingError, match="quantised with fp8"):
        require_splittable(checkpoint, trunk)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("model__offload", "cpu", "model.offload: 'cpu' with model.tensor_parallel: 2"),
        ("model__quantization", "4bit", "model.quantization: '4bit' with model.tensor_parallel: 2"),
        ("model__adapter", "lora", "model.adapter: 'lora' with model.tensor_parallel: 2"),
    ],
)
def test_what_cannot_be_split_is_refused_by_the_recipe(field: str, value: Any, told: str, tmp_path: Path) -> None:
    mapping = tiny_mapping(tmp_path, tmp_path / "run", model__tensor_parallel=2, **{field: value})
    with pytest.raises(RecipeError, match=told.replace(".", r"\.")):
        recipe_from_mapping(mapping)
    mapping["model"]["tensor_parallel"] = None
    assert keeps_whole(recipe_from_mapping(mapping))
