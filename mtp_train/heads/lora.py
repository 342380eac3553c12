"""LoRA on the head (arXiv:2106.09685, equation 3), by peft: the head's own weights stay, low-rank matrices learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.errors import RecipeError
from mtp_train.families import Convention, Family
from mtp_train.heads.module import MtpHead
from mtp_train.recipe import LoraSpec

_MATRICES = (".lora_A.", ".lora_B.")


def put_on_lora(head: MtpHead, spec: LoraSpec, *, seed: int) -> Any:
    """Give a head low-rank matrices, in place; of all its weights only they are left to train.

    What is not trained without LoRA gets none: an indexer, a module's own output matrix.

    Returns:
        peft's tuner around the head's modules, for :func:`merged_weights`.

    Raises:
        RecipeError: A target is no layer of the head.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    layers, experts = _chosen(head.blocks, spec.targets)
    config = LoraConfig(r=spec.r, lora_alpha=spec.alpha, target_modules=layers, target_parameters=experts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not the head: peft would rewrite the targets by what it knows of the config's model.
        tuner = LoraModel(head.blocks, {"default": config}, "default")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(is_lora(name))
    return tuner


def is_lora(name: str) -> bool:
    """Say whether a parameter of a head is one of LoRA's."""
    return any(part in name for part in _MATRICES)


def merged_weights(head: MtpHead, spec: LoraSpec, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a head with LoRA's matrices merged into its weights, under the head's usual names.

    Args:
        head: The head that they were trained on, as it was; it is changed.
        spec: The recipe's.
        matrices: Those that were trained; a module that no depth uses has none.
    """
    tuner = put_on_lora(head, spec, seed=0)
    head.load_state_dict(matrices, strict=False)
    tuner.merge_and_unload()
    return head.state_dict()


def require_lora_targets(
    spec: LoraSpec, family: Family, text_config: PretrainedConfig, num_modules: int, convention: Convention
) -> int:
    """Check that a head of these shapes has what LoRA is to be put on; allocates nothing.

    Returns:
        How many weights are then trained.

    Raises:
        RecipeError: It has not.
    """
    with torch.device("meta"):
        head = MtpHead(family, text_config, num_modules=num_modules, convention=convention)
        put_on_lora(head, spec, seed=0)
    return sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)


def _chosen(blocks: nn.Module, targets: tuple[str, ...] | None) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers and of the stacked experts that are asked for."""
    # Not its subclasses: DeepSeek V4 has one that multiplies group by group, and peft's matrices would not.
    layers = [name for name, part in blocks.named_modules() if type(part) is nn.Linear and part.weight.requires_grad]
    experts = [name for name, value in blocks.named_parameters() if ".experts." in name and value.ndim == 3]
    if targets is None:
        return layers, experts
    known = sorted({name.rpartition(".")[-1] for name in layers + experts})
    problems = [
        f"head.lora.targets.{index}: {target!r}; expected a layer of the head: {', '.join(known)}. Write one of these, "
        "or head.lora.targets: null for all."
        for index, target in enumerate(targets)
        if target not in known
    ]
    if problems:
        raise RecipeError(problems)
    return (
        [name for name in layers if name.rpartition(".")[-1] in targets],
        [name for name in experts if name.rpartition(".")[-1] in targets],
    )
