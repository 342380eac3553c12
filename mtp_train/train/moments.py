"""AdamW's moments of a parameter, read and written whole, wherever the optimiser keeps them.

torch keeps them by parameter, in shards under FSDP2. DeepSpeed flattens the parameters of a group, cuts the result
among the processes, and knows which cut holds what of which parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mtp_train.train.shard import whole

FIELDS = ("exp_avg", "exp_avg_sq")


class Moments(NamedTuple):
    """What AdamW knows of one parameter."""

    step: float
    """Its own count of steps, for the bias correction."""
    values: dict[str, Tensor]
    """The moments by name, each of the parameter's shape."""


class TorchMoments:
    """Those of a torch optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state = optimizer.state

    def get(self, parameter: nn.Parameter) -> Moments | None:
        """Return a parameter's moments, None where no loss has reached it yet."""
        entry = self.state.get(parameter)
        return Moments(float(entry["step"]), {field: whole(entry[field]) for field in FIELDS}) if entry else None

    def put(self, parameter: nn.Parameter, moments: Moments) -> None:
        """Give a parameter moments."""
        values = {field: _laid_out_as(parameter, value) for field, value in moments.values.items()}
        self.state[parameter] = {"step": torch.tensor(moments.step), **values}


class ZeroMoments:
    """Those of DeepSpeed's ZeRO-2 and ZeRO-3."""

    def __init__(self, optimizer: Any) -> None:
        self.zero = optimizer
        self.state = optimizer.optimizer.state

    def get(self, parameter: nn.Parameter) -> Moments | None:
        """Return a parameter's moments."""
        from deepspeed.utils import safe_get_full_optimizer_state

        values = {field: safe_get_full_optimizer_state(parameter, field) for field in FIELDS}
        return Moments(float(next(iter(self.state.values()))["step"]), values)

    def put(self, parameter: nn.Parameter, moments: Moments) -> None:
        """Give a parameter moments."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        for entry in self.state.values():
            entry["step"] = torch.tensor(moments.step)
        partition: Tensor | None = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else None
        for field, value in moments.values.items():
            if partition is None:
                safe_set_full_optimizer_state(parameter, value, field)
            else:
                # DeepSpeed's own cut of a whole value has no room for the padding of the last partition.
                safe_set_local_optimizer_state(parameter, _own_part(value, partition.numel()), field)

    def make_room(self) -> None:
        """Do what the optimiser does at its first step.

        Left to itself, ZeRO-2 ties parameters to their moments when the first of its groups has made that step, and
        finds none for those of the other groups.
        """
        zero = self.zero
        in_parts = hasattr(zero, "fp32_partitioned_groups_flat")
        for flat in zero.fp32_partitioned_groups_flat if in_parts else zero.single_partition_of_fp32_groups:
            self.state[flat] = {"step": torch.tensor(0.0), **{field: torch.zeros_like(flat) for field in FIELDS}}
        if not in_parts:
            zero._lazy_init_hp_params_optimizer_state()


def moments_of(optimizer: Any) -> TorchMoments | ZeroMoments:
    """Return the moments of an optimiser, prepared by accelerate or not."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return TorchMoments(inner) if isinstance(inner, torch.optim.Optimizer) else ZeroMoments(inner)


def _laid_out_as(parameter: nn.Parameter, value: Tensor) -> Tensor:
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _own_part(value: Tensor, size: int) -> Tensor:
    """Return this process's part of a flattened value, of equal size in all processes, zeros at the very end."""
    padded = value.new_zeros(size * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    return padded[size * torch.distributed.get_rank() :][:size]
