"""Every use of an undocumented part of DeepSpeed: the groups of its ZeRO optimisers, and partitioned parameters.

``SYMBOLS`` is looked up by tests/unit/test_upstream.py where DeepSpeed is installed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

SYMBOLS = (
    # Moments can be set through deepspeed.utils only after a first step, which would change the weights.
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.single_partition_of_fp32_groups",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat",
    # There is no documented way to free a partition, or to learn its size with padding.
    "deepspeed.runtime.zero.partition_parameters.ds_tensor",
    # No documented query tells whether a parameter is partitioned.
    "deepspeed.runtime.zero.partition_parameters.ds_id",
    # The documented set_z3_leaf_modules takes classes; we mark the layers of the trunk, not those of the head.
    "deepspeed.utils.z3_leaf_module.set_z3_leaf_module",
)


def flat_groups(optimizer: Any) -> list[Tensor]:
    """Return this process's fp32 weights of a ZeRO-2 or ZeRO-3 optimiser, a flat tensor for each parameter group."""
    if is_zero_3(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def is_zero_3(optimizer: Any) -> bool:
    """Return whether an optimiser belongs to ZeRO-3, which partitions the parameters as well as the moments."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def link_moments(optimizer: Any) -> None:
    """Connect the parameters of a ZeRO-2 optimiser to their moments, as its first step does."""
    optimizer._lazy_init_hp_params_optimizer_state()


def partition_of(parameter: nn.Parameter) -> Tensor | None:
    """Return this process's part of a partitioned parameter, with padding; None for a parameter that is whole."""
    return getattr(parameter, "ds_tensor", None)


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO-3 manages a parameter, also while the parameter is gathered."""
    return hasattr(parameter, "ds_id")


def fetch_as_a_whole(module: nn.Module) -> None:
    """Make ZeRO-3 gather all parameters of a module at once, before the module runs."""
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    set_z3_leaf_module(module, True)
