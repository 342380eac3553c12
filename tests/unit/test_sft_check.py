"""``mtp-train check`` of a fine-tune, from the config alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from fine_tunes import LORA, tuning
from mtp_train import check
from mtp_train.errors import CheckpointError, RecipeError, TrainingError, UnsupportedModelError
from mtp_train.families import family_for
from mtp_train.job.sft.estimate_memory import TuningFootprint
from mtp_train.job.sft.tuned_model import require_trainable
from mtp_train.job.sft.tuning import require_whole_model
from mtp_train.weights.locations import open_location
from runs import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("check") / "in")


def memory(inputs: Path, **settings: Any) -> TuningFootprint:
    found = check(tuning(inputs, inputs / "run", **settings), processes=1).memory
    assert isinstance(found, TuningFootprint)
    return found


def test_full_training_needs_sixteen_bytes_a_weight_and_lora_few(inputs: Path) -> None:
    full, lora = memory(inputs, way="kept"), memory(inputs, way="kept", lora=LORA)
    assert full.trunk_bytes + full.learning_bytes == 16 * full.trunk_parameters
    assert full.trained_parameters == full.trunk_parameters
    assert lora.trunk_bytes == 2 * lora.trunk_parameters
    assert lora.learning_bytes == 16 * lora.trained_parameters
    # Two projections of the one layer in four that attends: rank 4 x (inputs + outputs) of each.
    config = open_location(str(inputs / "base")).text_config
    width, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    attending = sum(kind == "full_attention" for kind in config["layer_types"])
    # The query's projection holds its gate, too.
    assert lora.trained_parameters == attending * 4 * ((width + 2 * heads) + (heads + width))


def test_half_the_precision_and_less_kept_need_less(inputs: Path) -> None:
    full = memory(inputs, way="kept")
    half = memory(inputs, way="kept", model={"trunk": str(inputs / "base"), "dtype": "bfloat16"})
    assert 2 * (half.trunk_bytes + half.learning_bytes) == full.trunk_bytes + full.learning_bytes
    assert memory(inputs, way="kept", train__gradient_checkpointing=True).activation_bytes < full.activation_bytes


def test_products_in_bf16_of_weights_in_fp32_need_copies(inputs: Path) -> None:
    exact, rounded = memory(inputs, way="kept"), memory(inputs, way="kept", train__precision="bf16")
    config = open_location(str(inputs / "base")).text_config
    embedding = config["vocab_size"] * config["hidden_size"]
    assert not config["tie_word_embeddings"]
    assert (exact.converted_bytes, rounded.converted_bytes) == (0, 2 * (rounded.trunk_parameters - embedding))
    half = {"trunk": str(inputs / "base"), "dtype": "bfloat16"}
    assert memory(inputs, way="kept", train__precision="bf16", model=half).converted_bytes == 0


def test_a_recurrent_layer_keeps_more_than_one_that_attends(inputs: Path) -> None:
    config = open_location(str(inputs / "base")).text_config
    kinds = config["layer_types"]
    each = sum(260 if kind == "linear_attention" else 100 for kind in kinds)
    assert set(kinds) == {"linear_attention", "full_attention"}
    assert memory(inputs, way="kept").activation_bytes == 96 * config["hidden_size"] * each


def test_a_head_beside_costs_its_training(inputs: Path) -> None:
    kept, beside = memory(inputs, way="kept"), memory(inputs)
    assert kept.head_and_optimizer_bytes == 0
    assert beside.head_and_optimizer_bytes == 16 * beside.head_parameters
    assert beside.trained_parameters == kept.trained_parameters + beside.head_parameters


def test_the_text_says_what_is_trained(inputs: Path) -> None:
    result = check(tuning(inputs, inputs / "run", lora=LORA), processes=2)
    assert "\n# sft: LoRA of rank 4 on the trunk, its head beside; every process holds the whole model" in str(result)
    assert "its gradients and moments" in str(result)
    assert result.memory_in_shards is None
    assert result.to_json()["memory"]["learning_bytes"] == 16 * (
        result.memory.trained_parameters - result.memory.head_parameters
    )


def test_what_cannot_be_trained_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"sft\.lora\.targets\.0: 'foo'; expected a linear layer of the trunk: down_"):
        check(tuning(inputs, tmp_path / "run", lora={"targets": ["foo"]}), processes=1)
    config = json.loads((inputs / "base" / "config.json").read_text())
    family = family_for(config, where="base")
    with pytest.raises(CheckpointError, match=r"base: quantised \(fp8\), and sft trains its weights; expected plain"):
        require_trainable(family, {**config, "quantization_config": {"quant_method": "fp8"}}, where=inputs / "base")
    stand_in = family_for({"model_type": "mimo"}, where="base")
    with pytest.raises(UnsupportedModelError, match=r"through a stand-in class; expected a class that"):
        require_trainable(stand_in, {}, where=inputs / "base")


def test_a_launcher_that_asks_for_shards_is_refused() -> None:
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, deepspeed_plugin=SimpleNamespace(zero_stage=3))
    launched: Any = SimpleNamespace(state=state)
    with pytest.raises(
        TrainingError, match=r"sft: the launcher asks for FSDP; expected every process to hold the whole"
    ):
        require_whole_model(launched)
    state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(TrainingError, match=r"asks for DEEPSPEED ZeRO-3; expected every process"):
        require_whole_model(launched)
    state.deepspeed_plugin.zero_stage = 2
    require_whole_model(launched)
