"""The memory that ``check`` plans for a released model's shape, against hand arithmetic."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig

from mtp_train import CheckResult, check
from mtp_train.recipe.schema import Recipe
from mtp_train.runs import check as check_module, resolve
from mtp_train.runs.resolve import Lengths, ModelFacts, TextFacts
from mtp_train.train import machine
from mtp_train.train.machine import Device, device_named

# Qwen3.5 9B: 32 layers, every fourth with full attention, the others with Gated DeltaNet.
VOCAB, WIDTH, LAYERS, FULL = 248_320, 4096, 32, 8
MLP = 3 * WIDTH * 12_288
ATTENTION = WIDTH * 2 * 16 * 256 + 2 * WIDTH * 4 * 256 + 16 * 256 * WIDTH + 2 * 256
"""Queries with their gate, keys and values, output, two norms of 256 channels."""
DELTA = WIDTH * (2 * 2048 + 4096) + WIDTH * 4096 + 2 * WIDTH * 32 + 4 * 8192 + 4096 * WIDTH + 2 * 32 + 128
"""Queries, keys and values; gate; decay and beta; convolution of four taps; output; decay's parameters; norm."""
OUTSIDE = 2 * VOCAB * WIDTH + WIDTH
"""Embedding, output matrix and the last norm."""
TRUNK = OUTSIDE + LAYERS * (MLP + 2 * WIDTH) + FULL * ATTENTION + (LAYERS - FULL) * DELTA
HEAD = 2 * WIDTH * WIDTH + MLP + ATTENTION + 5 * WIDTH
"""A layer with full attention, the projection of two states, and its three norms."""


SHAPE = Qwen3_5TextConfig(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=12_288, num_attention_heads=16, num_key_value_heads=4
).to_dict() | {"mtp_num_hidden_layers": 1, "architectures": ["Qwen3_5ForCausalLM"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("plans")
    (directory / "trunk").mkdir()
    (directory / "trunk" / "config.json").write_text(json.dumps(SHAPE, default=str))
    (directory / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    return {
        "run_dir": str(directory / "run"),
        "model": {"trunk": str(directory / "trunk")},
        "head": {"num_depths": 3, "init": "native"},
        "data": {
            "sources": [{"path": str(directory / "prompts.jsonl")}],
            "seq_len_tokens": 2048,
            "regenerate": {"max_prompts": 20_000, "batch_size": 64},
        },
        "train": {"max_steps": 500, "tokens_per_step": 65_536, "lr": 1e-4, "micro_batch_sequences": 1},
        "evaluate": {"arms": ["none", "native", "retrained"]},
    }


def planned(recipe: dict[str, Any], processes: int, device: str = "H100") -> CheckResult:
    return check(recipe, processes=processes, device=device)


def fits(recipe: dict[str, Any], arguments: str, device: str) -> bool:
    """Return whether a recipe fits with arguments that a plan named."""
    words = shlex.split(arguments)
    processes = int(words[-1]) if "--processes" in words else 1
    overrides = [word for word in words if "=" in word]
    return check(recipe, overrides, processes=processes, device=device).room.problem is None


def test_memory_of_nine_billion_parameters_on_one_gpu(recipe: dict[str, Any]) -> None:
    memory = planned(recipe, 1).memory
    assert memory.trunk_parameters == TRUNK == 8_953_803_264
    assert memory.trunk_bytes == 2 * TRUNK
    assert memory.head_parameters == memory.trained_parameters == HEAD
    # Weights, gradients and two moments in fp32.
    assert memory.head_and_optimizer_bytes == 16 * HEAD
    # Five fp32 tensors of as many rows, in units of 128, as take 2 GB.
    assert memory.loss_rows == 384
    assert memory.loss_bytes == 5 * 384 * VOCAB * 4 < 2e9 < 5 * 512 * VOCAB * 4
    # To decode: the trunk and two heads, and the keys and values of 64 texts in layers with full attention.
    kept = 64 * 2048 * FULL * 2 * 4 * 256 * 2
    told = f"{(2 * TRUNK + 2 * 2 * HEAD + kept) / 2**30:.2f} GiB, of which keys and values at most {kept / 2**30:.2f}"
    assert f"to answer and to measure: {told}: 64 texts" in str(planned(recipe, 1))
    # A thirty-second part of 24 GB has no room for 256 rows.
    small = planned(recipe, 1, "RTX4090")
    assert small.memory.loss_rows == 256
    assert f"loss {small.memory.loss_bytes / 2**30:.2f} in chunks of 256 rows, activations" in str(small)


def test_memory_of_nine_billion_parameters_in_eight_shards(recipe: dict[str, Any]) -> None:
    memory = planned(recipe, 8).room.in_shards
    assert memory is not None
    # A shard of the layers, and beside it what is whole: everything outside of them, and the two largest layers.
    largest = MLP + 2 * WIDTH + DELTA
    assert memory.trunk_bytes == 2 * (TRUNK - OUTSIDE) // 8 + 2 * (OUTSIDE + 2 * largest)
    assert memory.head_and_optimizer_bytes == 16 * HEAD // 8 + 8 * HEAD
    # The head is gathered in bf16, and not converted once more.
    assert planned(recipe, 1).memory.converted_bytes > memory.converted_bytes == 0


def test_main_memory_while_nine_billion_parameters_are_loaded(recipe: dict[str, Any]) -> None:
    found = planned(recipe, 8)
    assert found.room.in_shards is not None
    assert found.memory.loading_bytes == 2 * TRUNK
    # Everything outside of the layers, the largest layer and a copy of it.
    largest = MLP + 2 * WIDTH + DELTA
    assert found.room.in_shards.loading_bytes == 2 * (OUTSIDE + 2 * largest)
    assert "\nmain memory of each, to load: 16.68 GiB; 4.60 GiB with fsdp2.yaml\n" in str(found)


def test_a_run_that_does_not_fit_names_settings_that_do_and_nothing_else(recipe: dict[str, Any]) -> None:
    # 17 GiB of trunk, which 85 % of 24 hold; two heads make 18.
    needed = planned(recipe, 1, "24 gib")
    assert needed.room.problem == "24.2 GiB to train on each process, on a GPU of 24 GiB"
    assert str(needed).startswith(f"does not fit: {needed.room.problem}\nfits with: one of these")
    assert "model.offload=cpu" in needed.fitting
    assert "\nlaunch" not in str(needed)
    for arguments in needed.fitting:
        assert fits(recipe, arguments, "24GiB"), arguments
    assert planned(recipe, 1, "32GiB").fitting == {}
    found = planned(recipe, 2, "11GiB")
    assert str(found).startswith("does not fit: 17.6 GiB of trunk and two heads")
    assert "model.offload=cpu train.gradient_checkpointing=true --processes 1" in found.fitting


def test_settings_that_fit_do_so_with_the_automatic_ones_that_follow_them(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed trunk leaves room for larger micro-batches, which are then chosen."""

    def facts(recipe: Recipe, world_size: int, device: Device) -> ModelFacts:
        spare = 1 << 20 if recipe.model.quantization is None else 60 << 30
        return ModelFacts(WIDTH, 4096, 1 << 15, "cuda", spare, spare, world_size)

    monkeypatch.setattr(resolve, "model_facts", facts)
    text = TextFacts({"a": 900, "b": 100}, Lengths(100, 200), Lengths(100, 200), Lengths(200, 400))
    monkeypatch.setattr(resolve, "text_facts", lambda recipe: text)
    automatic = recipe | {"train": recipe["train"] | {"micro_batch_sequences": "auto"}}
    needed = check(automatic, device="20GiB")
    assert needed.recipe.train.micro_batch_sequences == 1
    assert needed.fitting
    for arguments in needed.fitting:
        assert fits(automatic, arguments, "20GiB"), arguments


def test_the_plan_has_the_cost_of_selecting_the_best_step(recipe: dict[str, Any]) -> None:
    told = "selects: the best of 6 measurements on at most 8192 tokens kept out of training"
    assert told not in str(planned(recipe, 1))
    recipe = {**recipe, "train": {**recipe["train"], "select": {"every_steps": 100}}}
    assert told in str(planned(recipe, 1))


def test_a_plan_for_a_gpu_names_kernels_that_are_missing(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "missing_kernels", lambda rule, kind: f"{rule.rule} on {kind}")
    found = planned(recipe, 1)
    assert found.to_json()["notes"] == ["gated_delta on cuda"]
    assert str(found).startswith("attention: gated_delta on cuda\n")
    monkeypatch.setattr(check_module, "missing_kernels", lambda *_: None)
    assert "attention: " not in str(planned(recipe, 1))


def test_a_gpu_of_the_table_gives_the_plan_that_the_gpu_itself_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    for reported in (79.1, 79.6):
        properties = SimpleNamespace(total_memory=int(reported * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda properties=properties: properties)
        assert device_named(None)[1:] == device_named("h100")[1:]


def test_a_gpu_is_named_by_its_memory_in_either_unit() -> None:
    assert device_named("24GiB").memory_bytes == 24 * 2**30
    assert device_named("16GB").memory_bytes == pytest.approx(16e9, abs=10)
    assert str(device_named("16 gb")) == "a GPU of 14.9 GiB"
