"""Train a head with LoRA (arXiv:2106.09685, equation 3) through peft: the head's own weights stay frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.errors import RecipeError
from mtp_train.families import Convention, Family
from mtp_train.heads.experts import is_stacked
from mtp_train.heads.head import Head


class LoraSettings(Protocol):
    """Settings of LoRA, as the recipe's ``head.lora`` has them."""

    r: int
    """The rank; of stacked experts, the rank of each expert."""
    alpha: int
    """The product of the low-rank matrices is scaled by ``alpha / r``."""
    targets: tuple[str, ...] | None
    """Layers to adapt, by the last part of their names; None for all linear layers and experts."""


def put_on_lora(head: Head, spec: LoraSettings, *, seed: int) -> Any:
    """Add low-rank matrices to a head, in place, and leave only those matrices trainable.

    Modules that are frozen without LoRA get no matrices: indexers, and a module's own output matrix.

    Returns:
        peft's tuner around the head's modules, for :func:`merged_weights`.
    """
    from peft import LoraConfig, LoraModel

    # No subclasses: DeepSeek V4 has one that multiplies group by group, which peft's matrices would not do.
    parts = head.blocks.named_modules()
    layers = [name for name, part in parts if type(part) is nn.Linear and part.weight.requires_grad]
    experts = [name for name, value in head.blocks.named_parameters() if is_stacked(name, value.shape)]
    known = sorted({name.rpartition(".")[-1] for name in layers + experts})
    problems = [
        f"head.lora.targets.{index}: {target!r}; expected a layer of the head: {', '.join(known)}. Write one of these, "
        "or head.lora.targets: null for all."
        for index, target in enumerate(spec.targets or ())
        if target not in known
    ]
    if problems:
        raise RecipeError(*problems)
    modules, parameters = ([name for name in some if is_target(name, spec.targets)] for some in (layers, experts))
    config = LoraConfig(r=spec.r, lora_alpha=spec.alpha, target_modules=modules, target_parameters=parameters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The blocks, not the head: peft would replace the targets with its defaults for the model type of the head's
        # config.
        tuner = LoraModel(head.blocks, {"default": config}, "default")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(is_lora(name))
    return tuner


def is_lora(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def is_target(name: str, targets: tuple[str, ...] | None) -> bool:
    """Return whether the targets of a recipe, None for all, include a layer or a tensor of experts of this name."""
    return targets is None or name.rpartition(".")[-1] in targets


def merged_weights(head: Head, spec: LoraSettings, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge LoRA's matrices into a head as it was before training, in place; return its state dict.

    Modules that no depth uses have no matrices.
    """
    tuner = put_on_lora(head, spec, seed=0)
    head.load_state_dict(matrices, strict=False)
    tuner.merge_and_unload()
    return head.state_dict()


def require_lora_targets(
    spec: LoraSettings, family: Family, text_config: PretrainedConfig, num_modules: int, convention: Convention
) -> int:
    """Return the number of trainable weights with LoRA on a head of these shapes; allocates none of them."""
    with torch.device("meta"):
        head = family.kind.make_head(family, text_config, num_modules=num_modules, convention=convention)
        put_on_lora(head, spec, seed=0)
    return sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
