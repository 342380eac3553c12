"""Load the model to fine-tune with trainable weights, wrapped in LoRA if the recipe asks for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_train.errors import CheckpointError, RecipeError, UnsupportedModelError
from mtp_train.families import Family, RawConfig
from mtp_train.heads.diagnose import trunk_config
from mtp_train.job.inputs import Inputs, trunk_dtype
from mtp_train.recipe.schema import Recipe, SftSection, TrunkLoraSpec
from mtp_train.trunk.load import Trunk, empty_trunk, load_trunk
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.quantised import quant_method


def require_trainable(family: Family, config: RawConfig, *, where: Path) -> None:
    """Check that a checkpoint's weights can be trained, and written back in its own layout.

    Raises:
        CheckpointError: The weights are quantised.
        UnsupportedModelError: transformers has no class of this model, and would save the layout of a stand-in.
    """
    method = quant_method(config)
    if method is not None:
        raise CheckpointError(
            f"{where}: quantised ({method}), and sft trains its weights; expected plain weights. Point model.trunk at "
            "the checkpoint that was quantised."
        )
    if family.trunk.stand_in is not None:
        raise UnsupportedModelError(
            f"{where}: {family.title} runs here through a stand-in class; expected a class that transformers saves and "
            "loads. Fine-tune it with its makers' tools, then use mtp-train graft."
        )


def unloaded_trunk(recipe: Recipe, checkpoint: Checkpoint) -> Trunk:
    """Return the trunk of a checkpoint without weights, to inspect its layers."""
    trusted, family = recipe.model.trust_remote_code, checkpoint.family
    return empty_trunk(
        trunk_config(checkpoint.path, family, trust_remote_code=trusted), family, trust_remote_code=trusted
    )


def load_model(recipe: Recipe, sft: SftSection, inputs: Inputs, saved: Path | None, device: torch.device) -> Any:
    """Load the model to train; weights that are not trained are frozen.

    Args:
        recipe: The recipe.
        sft: Its ``sft`` section.
        inputs: The run's inputs.
        saved: The training checkpoint to resume from. The Trainer loads it too, but only tensors with the same name in
            model and checkpoint, which stacked experts do not have.
        device: The device.
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
        # transformers renamed the setting; peft still uses the old name, for older releases.
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated", FutureWarning)
        if recipe.train.gradient_checkpointing:
            trunk.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if sft.lora is not None:
            return put_on_lora(trunk, sft.lora, seed=recipe.seed)
    trunk.decoder.requires_grad_(True)
    trunk.causal_lm.get_output_embeddings().requires_grad_(True)
    return trunk.causal_lm


def learning_dtype(recipe: Recipe, sft: SftSection, device: torch.device, source: Checkpoint) -> torch.dtype:
    """Return the dtype of the trunk's weights: for ``auto``, fp32 if they are trained, as small updates need it."""
    if recipe.model.dtype == "auto" and sft.lora is None:
        return torch.float32
    return trunk_dtype(recipe, device, source)


def put_on_lora(trunk: Trunk, spec: TrunkLoraSpec, *, seed: int) -> Any:
    """Wrap a trunk by peft, so that only LoRA's matrices are trained.

    Raises:
        RecipeError: A target is no linear layer of the trunk.
    """
    from peft import LoraConfig, get_peft_model

    # Full names: other layers than plain linear ones may share the last part of a name.
    chosen = lora_layers(trunk, spec)
    config = LoraConfig(r=spec.r, lora_alpha=spec.alpha, target_modules=chosen, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(trunk.causal_lm, config)


def lora_layers(trunk: Trunk, spec: TrunkLoraSpec) -> list[str]:
    """Return the full names of the linear layers that get LoRA matrices.

    Raises:
        RecipeError: A target is no linear layer of the trunk.
    """
    inside = set(trunk.layers.modules())
    # Subclasses of Linear are left out: DeepSeek V4 has one that multiplies by groups, which peft's matrices do not.
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
    """Return the number of weights in LoRA's matrices."""
    layers = (trunk.causal_lm.get_submodule(name) for name in lora_layers(trunk, spec))
    return sum(spec.r * (layer.in_features + layer.out_features) for layer in layers)
