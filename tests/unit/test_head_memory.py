"""The plan of what a training step holds of a head's weights beside the weights themselves, against such steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Size, Tensor
from transformers import AutoModelForCausalLM

from mtp_train.data.pack import PackedBatch
from mtp_train.heads.lora import put_on_lora
from mtp_train.heads.module import MtpHead
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.settings import memory_options
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.train.plan import converted_head_bytes, passing_expert_bytes
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import COMPUTE_DTYPES
from mtp_train.trunk.states import TrunkStates
from peak_memory import PeakMemory
from runs import tiny_recipe
from tiny import family_of, tiny_head, tiny_trunk
from tiny_configs import tiny_config
from witness_maker.chain import random_head

LORA: dict[str, Any] = {"r": 2}
ONE_OF_THE_EXPERTS: dict[str, Any] = {"r": 2, "targets": ["q_proj", "down_proj"]}


def recipe(precision: str, depths: int, lora: dict[str, Any] | None = None, checkpointing: bool = False) -> Recipe:
    settings = {"train__precision": precision, "train__gradient_checkpointing": checkpointing}
    return tiny_recipe(Path("in"), Path("run"), head__num_depths=depths, head__lora=lora, **settings)


class Step:
    """A training step of a head, as a recipe has it; the head gets LoRA's matrices if the recipe says so."""

    def __init__(self, trunk: Trunk, head: MtpHead, used: Recipe) -> None:
        self.weights = {name: value.detach().clone() for name, value in head.named_parameters()}
        if used.head.lora is not None:
            put_on_lora(head, used.head.lora, seed=0)
        self.module = HeadTraining(
            TrunkStates(trunk),
            head,
            num_depths=used.head.num_depths,
            kind="kl",
            temperature=1.0,
            recompute=used.train.gradient_checkpointing,
            compute_dtype=COMPUTE_DTYPES[used.train.precision],
        ).train()

    @property
    def shapes(self) -> dict[str, Size]:
        """The shapes of the head's own weights."""
        return {name: value.shape for name, value in self.weights.items()}

    def forward(self) -> Tensor:
        """Return the loss."""
        tokens_BT = torch.arange(12)[None]
        zeros_BT = torch.zeros_like(tokens_BT)
        scale_K = torch.ones(self.module.num_depths)
        batch = PackedBatch(tokens_BT, tokens_BT, zeros_BT, zeros_BT == 0)
        return self.module(MicroBatch(batch, scale_K)).total

    def kept_copies(self) -> int:
        """Return the bytes of copies in bf16 of the head's matrices that a forward keeps for the backward."""
        saved: dict[int, Tensor] = {}

        def keep(value: Tensor) -> Tensor:
            if value.dtype is torch.bfloat16:
                storage = value.untyped_storage()
                saved[storage.data_ptr()] = value.new_empty(0).set_(storage)
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            self.forward()
        halves = [value.bfloat16().flatten() for value in self.weights.values() if value.ndim > 1]
        return sum(one.nbytes for one in saved.values() if any(torch.equal(one, half) for half in halves))

    def peak_bytes(self) -> int:
        """Return the most bytes that forward and backward hold at a time, beside all weights."""
        with PeakMemory(self.module.parameters()) as memory:
            self.forward().backward()
        return memory.peak_bytes


@pytest.mark.parametrize(("kind", "planned"), [("eagle3", 100), ("eagle", None), ("mtp", None)])
def test_the_loss_is_over_the_tokens_that_engines_draft_from(kind: str, planned: int | None) -> None:
    used = tiny_recipe(Path("in"), Path("run"), head__kind=kind, head__init="random", head__draft_vocab=100)
    assert memory_options(used).loss_vocab == planned


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("depths", [1, 3])
def test_the_copies_of_a_heads_weights_are_planned(name: str, lora: dict[str, Any] | None, depths: int) -> None:
    trunk = tiny_trunk(name)
    used = recipe("bf16", depths, lora)
    step = Step(trunk, tiny_head(trunk), used)
    planned = converted_head_bytes(memory_options(used), step.shapes)
    # Not kept: the router's matrix, which is multiplied in fp32, and with LoRA the projection of depth 1, whose input
    # needs no gradient.
    unneeded = depths * step.shapes.get("blocks.0.layer.mlp.gate.weight", Size([0])).numel()
    unneeded += step.shapes["blocks.0.proj.weight"].numel() if lora else 0
    assert planned - 2 * unneeded <= step.kept_copies() <= planned


def test_with_checkpointing_copies_are_planned_for_one_depth() -> None:
    trunk = tiny_trunk("qwen3_5_moe")
    one = recipe("bf16", 3, LORA, True)
    three = recipe("bf16", 3, LORA)
    step = Step(trunk, tiny_head(trunk), one)
    assert 3 * converted_head_bytes(memory_options(one), step.shapes) == converted_head_bytes(
        memory_options(three), step.shapes
    )
    assert step.kept_copies() == 0


def with_experts(num_experts: int, used: Recipe) -> tuple[int, int]:
    """Return the peak of a step of a mixture, and what of it is planned by the shapes of its weights."""
    config = tiny_config("qwen3_5_moe", num_layers=1)
    config.num_experts = num_experts
    config.moe_intermediate_size = 64
    trunk = Trunk(AutoModelForCausalLM.from_config(config).requires_grad_(False).eval(), family_of("qwen3_5_moe"))
    # Held as it computes: no layer of the trunk is converted.
    step = Step(trunk.to(memory_options(used).compute_dtype), random_head(trunk).float(), used)
    gradients = 4 * sum(shape.numel() for shape in step.shapes.values()) if used.head.lora is None else 0
    planned = (
        gradients
        + converted_head_bytes(memory_options(used), step.shapes)
        + passing_expert_bytes(memory_options(used), step.shapes)
    )
    return step.peak_bytes(), planned


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [None, LORA, ONE_OF_THE_EXPERTS])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_more_experts_take_the_memory_that_is_planned(
    precision: str, lora: dict[str, Any] | None, checkpointing: bool
) -> None:
    used = recipe(precision, 3, lora, checkpointing)
    (few, planned_few), (many, planned_many) = with_experts(32, used), with_experts(64, used)
    assert 0.9 < (planned_many - planned_few) / (many - few) < 1.5
