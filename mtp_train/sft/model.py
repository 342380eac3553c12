"""The model that is fine-tuned: loaded so that it can learn, wrapped in LoRA where the recipe says so."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_train.errors import CheckpointError, RecipeError, UnsupportedModelError
from mtp_train.families import Family, RawConfig
from mtp_train.heads.trunk import Trunk, empty_trunk, load_trunk, trunk_config
from mtp_train.inputs import Inputs, trunk_dtype
from mtp_train.recipe import Recipe
from mtp_train.recipe_sft import SftSection, TrunkLoraSpec
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.quantised import quant_method


def require_trainable(family: Family, config: RawConfig, *, where: Path) -> None:
    """Check that a checkpoint's weights can learn, and be written back as they are stored.

    Raises:
        CheckpointError: They are quantised.
        UnsupportedModelError: transformers has no class of the model's own, whose saves would be of another model.
    """
    method = quant_method(config)
    if method is not None:
        raise CheckpointError(
            f"{where}: quantised ({method}), and sft trains its weights; expected plain ones. Point model.trunk at the "
            "checkpoint that this one was made from."
        )
    if family.trunk_class is not None:
        raise UnsupportedModelError(
            f"{where}: {family.title} runs here through a class that stands in for its own; expected one that "
            "transformers saves and loads. Fine-tune it with its makers' tools, then use mtp-train graft."
        )


def unloaded_trunk(recipe: Recipe, checkpoint: Checkpoint) -> Trunk:
    """Return the trunk of a checkpoint without weights, to look at its layers."""
    trusted, family = recipe.model.trust_remote_code, checkpoint.family
    return empty_trunk(
        trunk_config(checkpoint.path, family, trust_remote_code=trusted), family, trust_remote_code=trusted
    )


def load_model(recipe: Recipe, sft: SftSection, inputs: Inputs, saved: Path | None, device: torch.device) -> Any:
    """Load what is trained, its weights learning; the rest of it is frozen.

    Args:
        recipe: The recipe.
        sft: Its section.
        inputs: What was read and checked.
        saved: A checkpoint of the training to go on from. The Trainer loads it too, but only what a model's own names
            and a checkpoint's have in common; experts that transformers stacks are not.
        device: Where to.
    """
    source = inputs.finetune
    trunk = load_trunk(
        source.path if saved is None or sft.lora is not None else saved,
        source.family,
        dtype=learning_dtype(recipe, sft, device, source),
        device=device,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    with warnings.catch_warnings():
        # transformers has given the setting another name, which its older releases lack; peft asks by the old one.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated", FutureWarning)
        if recipe.train.gradient_checkpointing:
            trunk.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if sft.lora is not None:
            return put_on_lora(trunk, sft.lora, seed=recipe.seed)
    trunk.decoder.requires_grad_(True)
    trunk.causal_lm.get_output_embeddings().requires_grad_(True)
    return trunk.causal_lm


def learning_dtype(recipe: Recipe, sft: SftSection, device: torch.device, source: Checkpoint) -> torch.dtype:
    """Return the dtype of the trunk's weights: on ``auto`` fp32 where they learn, which small steps need."""
    if recipe.model.dtype == "auto" and sft.lora is None:
        return torch.float32
    return trunk_dtype(recipe, device, source)


def put_on_lora(trunk: Trunk, spec: TrunkLoraSpec, *, seed: int) -> Any:
    """Wrap a trunk by peft; of all its weights only LoRA's matrices are left to learn.

    Raises:
        RecipeError: A target is no linear layer of the trunk.
    """
    from peft import LoraConfig, get_peft_model

    # Full names: a name's last part may also be that of a layer that is no plain linear one.
    chosen = lora_layers(trunk, spec)
    config = LoraConfig(r=spec.r, lora_alpha=spec.alpha, target_modules=chosen, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(trunk.causal_lm, config)


def lora_layers(trunk: Trunk, spec: TrunkLoraSpec) -> list[str]:
    """Return the names of the linear layers that LoRA is put on, as they are in the whole model.

    Raises:
        RecipeError: A target is none.
    """
    inside = set(trunk.layers.modules())
    # Not its subclasses: DeepSeek V4 has one that multiplies group by group, and peft's matrices would not.
    layers = [name for name, part in trunk.causal_lm.named_modules() if part in inside and type(part) is nn.Linear]
    if spec.targets is None:
        return layers
    known = sorted({name.rpartition(".")[-1] for name in layers})
    problems = [
        f"sft.lora.targets.{index}: {target!r}; expected a linear layer of the trunk: {', '.join(known)}. Write one of "
        "these, or sft.lora.targets: null for all."
        for index, target in enumerate(spec.targets)
        if target not in known
    ]
    if problems:
        raise RecipeError(problems)
    return [name for name in layers if name.rpartition(".")[-1] in spec.targets]


def lora_weights(trunk: Trunk, spec: TrunkLoraSpec) -> int:
    """Return how many weights LoRA's matrices have."""
    layers = (trunk.causal_lm.get_submodule(name) for name in lora_layers(trunk, spec))
    return sum(spec.r * (layer.in_features + layer.out_features) for layer in layers)
