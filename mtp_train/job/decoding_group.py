"""Choose how many processes share one trunk while a run decodes, and refuse trunks that cannot be shared."""

from __future__ import annotations

import math
import os
from functools import partial

from mtp_train.errors import RecipeError, TrainingError, UnsupportedModelError
from mtp_train.heads.build import HeadPlan
from mtp_train.job.inputs import Inputs, trunk_dtype
from mtp_train.recipe.schema import Recipe
from mtp_train.train.devices import device_named
from mtp_train.train.launch import RunAccelerator
from mtp_train.trunk.load import Trunk, empty_trunk_at
from mtp_train.trunk.tensor_parallel import ParallelGroup, cuts_anything, group_sizes, part_bytes, smallest_fitting
from mtp_train.upstream.transformers_private import splits_models
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.quantised import quant_method

ROOM_SHARE = 0.85
"""The largest share of a device's memory for trunk and heads: caches and activations need the rest."""
NUM_HEADS = 2
"""Heads in memory beside the trunk: the retrained one and its baseline."""


def settle_group(recipe: Recipe, inputs: Inputs, accelerator: RunAccelerator) -> ParallelGroup | None:
    """Return the group of processes that shares the trunk with this one while it decodes; None if none does.

    Raises:
        RecipeError: ``model.tensor_parallel`` does not divide the number of processes.
        MtpError: The trunk, or the vanilla model's, cannot be shared.
    """
    decoded = [inputs.finetune]
    if inputs.base is not None and "vanilla" in recipe.evaluate.arms:
        decoded.append(inputs.base)
    size = recipe.model.tensor_parallel
    if size is None:
        size = max(_automatic_size(recipe, one, inputs.head_plan, accelerator) for one in decoded)
    require_size(size, accelerator.num_processes)
    if size == 1:
        return None
    for checkpoint in decoded:
        require_splittable(checkpoint, _empty(recipe, checkpoint))
    return accelerator.parallel_group(size)


def require_size(size: int, num_processes: int) -> None:
    """Check that groups of this size can be formed.

    Raises:
        RecipeError: They cannot.
    """
    sizes = group_sizes(num_processes, processes_per_node(num_processes))
    if size not in sizes:
        raise RecipeError(
            [
                f"model.tensor_parallel: {size}, with {num_processes} process(es); expected one of "
                f"{', '.join(map(str, sizes))}, by which the processes divide. Correct it, or write null."
            ]
        )


def require_splittable(checkpoint: Checkpoint, trunk: Trunk) -> None:
    """Check that a trunk can be loaded in parts.

    Args:
        checkpoint: Its checkpoint.
        trunk: The trunk without weights.

    Raises:
        UnsupportedModelError: transformers has no plan for it that gives the same logits, or is too old.
        TrainingError: The checkpoint is quantised.
    """
    hint = (
        "Measure it with model.offload: cpu on one process, or write model.tensor_parallel: 1 for GPUs that hold the "
        "whole trunk"
    )
    if not splits_models():
        raise UnsupportedModelError(
            "model.tensor_parallel: the installed transformers cannot load a part of a model in each process; expected "
            "5.23 or later. Upgrade it."
        )
    if quant_method(checkpoint.config) is not None:
        raise TrainingError(
            f"{checkpoint.path}: quantised with {quant_method(checkpoint.config)}, and several processes have to share "
            f"the trunk; expected plain weights. {hint}."
        )
    if not (checkpoint.family.trunk.tensor_parallel and cuts_anything(trunk.causal_lm)):
        raise UnsupportedModelError(
            f"{checkpoint.path}: {checkpoint.family.title}, for which transformers has no usable tensor-parallel plan, "
            f"and several processes have to share the trunk; expected a family with one. {hint}."
        )


def fitting_size(trunk: Trunk, itemsize: int, head_bytes: int, num_processes: int, memory_bytes: int) -> int:
    """Return the smallest number of processes whose devices hold trunk and heads; the largest possible if none do.

    Args:
        trunk: The trunk, possibly without weights.
        itemsize: Bytes of a number of the trunk.
        head_bytes: Bytes of the heads, which every process holds.
        num_processes: Processes of the run.
        memory_bytes: Memory of a device.
    """
    sizes = group_sizes(num_processes, processes_per_node(num_processes))
    room = int(ROOM_SHARE * memory_bytes) - head_bytes
    return smallest_fitting(sizes, partial(part_bytes, trunk.causal_lm, itemsize), room)


def processes_per_node(num_processes: int) -> int:
    """Return the number of processes on this node, which the launcher sets."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))


def keeps_whole(recipe: Recipe) -> bool:
    """Return whether a recipe's trunk is whole in each process, whatever its size, if the recipe sets no number."""
    model = recipe.model
    is_plain = model.offload is None and model.quantization is None and model.adapter is None
    return not (is_plain and recipe.decodes) or recipe.study is not None


def _automatic_size(recipe: Recipe, checkpoint: Checkpoint, plan: HeadPlan, accelerator: RunAccelerator) -> int:
    if accelerator.device.type != "cuda" or accelerator.num_processes == 1 or keeps_whole(recipe):
        return 1
    itemsize = trunk_dtype(recipe, accelerator.device, checkpoint).itemsize
    heads = NUM_HEADS * itemsize * sum(math.prod(tensor.shape) for tensor in plan.template.tensors)
    trunk = _empty(recipe, checkpoint)
    return fitting_size(trunk, itemsize, heads, accelerator.num_processes, device_named(None).memory_bytes)


def _empty(recipe: Recipe, checkpoint: Checkpoint) -> Trunk:
    return empty_trunk_at(checkpoint.path, checkpoint.family, trust_remote_code=recipe.model.trust_remote_code)
