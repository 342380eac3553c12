"""Running out of memory names the setting to change, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mtp_inference.bench.memory import PeakMemory
from mtp_inference.bench.subject import random_head
from mtp_train.errors import OutOfMemoryError
from mtp_train.heads.lora import put_on_lora
from mtp_train.recipe.loading import recipe_from_mapping
from mtp_train.recipe.schema import Recipe
from mtp_train.train.estimate import converted_head_bytes, memory_is_named, passing_expert_bytes
from mtp_train.train.head_training import HeadTraining
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import COMPUTE_DTYPES
from tiny import family_of, tiny_head, tiny_trunk
from tiny_configs import tiny_config

SMALLEST = {
    "run_dir": "run",
    "model": {"trunk": "finetune", "head_from": "base"},
    "data": {"sources": [{"path": "chats.jsonl"}], "regenerate": {}},
    "train": {"max_steps": 10, "tokens_per_step": 2048, "lr": 1e-3},
    "evaluate": {"arms": ["none", "graft", "retrained"]},
}
CUDA = (
    "CUDA out of memory. Tried to allocate 7.58 GiB. GPU 0 has a total capacity of 23.57 GiB of which 4.12 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096 bytes."
)
MICRO, CHECKPOINTING, CACHE = (
    "train.micro_batch_sequences=4",
    "train.gradient_checkpointing=true",
    "train.hidden_cache={}",
)
SFT = [
    "sft={head: kept}",
    "data.regenerate=null",
    "data.pack=false",
    "evaluate.arms=[none, graft]",
    "train.gradient_checkpointing=true",
]
STUDY = ["study={batch: 4}", "export.enabled=false", "evaluate.arms=[graft, retrained, vanilla]"]


def recipe(*overrides: str) -> Recipe:
    return recipe_from_mapping(SMALLEST, overrides)


@pytest.mark.parametrize(
    ("stage", "overrides", "cure"),
    [
        ("check", [], "Write model.dtype: bfloat16 or model.offload: cpu, or launch with recipes/accelerate/fsdp2"),
        ("check", ["model.offload=cpu"], "Write model.dtype: bfloat16, or launch with recipes/accelerate/fsdp2.yaml"),
        ("data", [], "Lower data.regenerate.batch_size, or data.regenerate.max_new_tokens (256)."),
        ("train", [MICRO], "Write train.micro_batch_sequences: 1; it is 4"),
        ("train", [], "Write train.gradient_checkpointing: true"),
        ("train", [CHECKPOINTING], "Write train.hidden_cache: {}"),
        ("train", [CHECKPOINTING, CACHE], "Lower data.seq_len_tokens (512), or launch with recipes/acc"),
        ("train", SFT, "Write 'sft.lora={r: 16}', which trains few weights, or lower data.seq_len_tokens (512)."),
        ("train", [*SFT, "sft.lora={}"], "Write model.dtype: bfloat16, or lower data.seq_len_tokens (512)."),
        ("evaluate", [], "Lower evaluate.dense_tokens"),
        ("evaluate", STUDY, "Lower study.batch (4), or evaluate.max_new_tokens"),
        ("drift", STUDY, "Write study.drift: null"),
    ],
)
def test_the_setting_that_helps_is_named(stage: str, overrides: list[str], cure: str) -> None:
    with pytest.raises(OutOfMemoryError) as found, memory_is_named(recipe(*overrides), lambda: stage):
        raise torch.OutOfMemoryError(CUDA)
    message = str(found.value)
    assert message.startswith(
        f"stage '{stage}': out of memory (CUDA out of memory. Tried to allocate 7.58 GiB); expected it to suffice. "
    )
    assert cure in message
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError()])
def test_a_machine_is_full_in_other_words(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match="out of memory"), memory_is_named(recipe(), lambda: "train"):
        raise error


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_is_named(recipe(), lambda: "train"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def kept_copies(name: str, used: Recipe) -> tuple[dict[str, torch.Size], int]:
    """Return the shapes of a head's weights, and the bytes of copies in bf16 that a forward keeps for the backward."""
    trunk = tiny_trunk(name)
    head = tiny_head(trunk)
    plain = {key: value.detach().clone() for key, value in head.named_parameters()}
    if used.head.lora is not None:
        put_on_lora(head, used.head.lora, seed=0)
    settings: dict[str, Any] = {"num_depths": used.head.num_depths, "kind": "kl", "temperature": 1.0}
    module = HeadTraining(
        trunk, head, **settings, recompute=used.train.gradient_checkpointing, compute_dtype=torch.bfloat16
    )
    saved: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        if value.dtype is torch.bfloat16:
            storage = value.untyped_storage()
            saved[storage.data_ptr()] = value.new_empty(0).set_(storage)
        return value

    tokens_BT = torch.arange(24)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        zeros_BT = torch.zeros_like(tokens_BT)
        module.train()(tokens_BT, tokens_BT, zeros_BT, zeros_BT == 0, torch.ones(settings["num_depths"]))
    halves = [value.bfloat16().flatten() for value in plain.values() if value.ndim > 1]
    copies = [one for one in saved.values() if any(torch.equal(one, half) for half in halves)]
    return {key: value.shape for key, value in plain.items()}, sum(one.nbytes for one in copies)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("lora", [[], ["head.lora={r: 2}"]])
@pytest.mark.parametrize("depths", [1, 3])
def test_the_copies_of_a_heads_weights_are_planned(name: str, lora: list[str], depths: int) -> None:
    used = recipe("train.precision=bf16", f"head.num_depths={depths}", *lora)
    shapes, kept = kept_copies(name, used)
    # Not kept: the router's matrix, which is multiplied in fp32, and with LoRA the projection of depth 1, whose input
    # needs no gradient.
    unneeded = depths * shapes.get("blocks.0.layer.mlp.gate.weight", torch.Size([0])).numel()
    unneeded += shapes["blocks.0.proj.weight"].numel() if lora else 0
    assert converted_head_bytes(used, shapes) - 2 * unneeded <= kept <= converted_head_bytes(used, shapes)


def peak(num_experts: int, used: Recipe) -> tuple[int, int]:
    """Return the peak bytes of a step beside all parameters, and what of it is planned by the number of experts."""
    config = tiny_config("qwen3_5_moe", num_layers=1)
    config.num_experts, config.moe_intermediate_size = num_experts, 64
    trunk = Trunk(AutoModelForCausalLM.from_config(config).requires_grad_(False).eval(), family_of("qwen3_5_moe"))
    head = random_head(trunk)
    shapes = {name: value.shape for name, value in head.named_parameters()}
    gradients = 4 * sum(value.numel() for value in head.parameters())
    if used.head.lora is not None:
        put_on_lora(head, used.head.lora, seed=0)
        gradients = 0
    module = HeadTraining(
        trunk,
        head,
        num_depths=used.head.num_depths,
        kind="kl",
        temperature=1.0,
        recompute=used.train.gradient_checkpointing,
        compute_dtype=COMPUTE_DTYPES[used.train.precision],
    ).train()
    tokens_BT = torch.arange(8)[None]
    zeros_BT = torch.zeros_like(tokens_BT)
    with PeakMemory(module.parameters()) as memory:
        given = (tokens_BT, tokens_BT, zeros_BT, zeros_BT == 0, torch.ones(used.head.num_depths))
        module(*given).total.backward()
    planned = gradients + converted_head_bytes(used, shapes) + passing_expert_bytes(used, shapes)
    return memory.peak_bytes, planned


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [[], ["head.lora={r: 2}"], ["head.lora={r: 2, targets: [q_proj, down_proj]}"]])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_more_experts_take_the_memory_that_is_planned(precision: str, lora: list[str], checkpointing: str) -> None:
    used = recipe(
        f"train.precision={precision}", f"train.gradient_checkpointing={checkpointing}", "head.num_depths=3", *lora
    )
    (few, planned_few), (many, planned_many) = peak(32, used), peak(64, used)
    assert 0.9 < (planned_many - planned_few) / (many - few) < 1.5


def test_with_checkpointing_copies_are_planned_for_one_depth() -> None:
    settings = "train.precision=bf16", "head.num_depths=3", "head.lora={r: 2}"
    shapes, _ = kept_copies("qwen3_5_moe", recipe(*settings))
    one, three = (recipe(*settings, f"train.gradient_checkpointing={value}") for value in ("true", "false"))
    assert 3 * converted_head_bytes(one, shapes) == converted_head_bytes(three, shapes)
    assert kept_copies("qwen3_5_moe", one)[1] == 0
