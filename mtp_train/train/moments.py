"""Read and write AdamW's moments of a parameter as whole tensors, under every wrapper.

torch stores them by parameter, in shards under FSDP2. DeepSpeed flattens the parameters of a group, partitions the
result over the processes, and maps partitions to parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mtp_train.train.shard import whole
from mtp_train.upstream.deepspeed_private import flat_groups, is_zero_3, link_moments, partition_of

FIELDS = ("exp_avg", "exp_avg_sq")


class Moments(NamedTuple):
    """AdamW's state of one parameter."""

    step: float
    """The parameter's count of steps, for the bias correction."""
    values: dict[str, Tensor]
    """The moments by name, each of the parameter's shape."""


class TorchMoments:
    """The moments of a torch optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state = optimizer.state

    def get(self, parameter: nn.Parameter) -> Moments | None:
        """Return a parameter's moments; None before its first gradient."""
        entry = self.state.get(parameter)
        return Moments(float(entry["step"]), {field: whole(entry[field]) for field in FIELDS}) if entry else None

    def put(self, parameter: nn.Parameter, moments: Moments) -> None:
        """Give a parameter moments."""
        values = {field: _laid_out_as(parameter, value) for field, value in moments.values.items()}
        self.state[parameter] = {"step": torch.tensor(moments.step), **values}


class ZeroMoments:
    """The moments of DeepSpeed's ZeRO-2 and ZeRO-3."""

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
        partition = partition_of(parameter)
        for field, value in moments.values.items():
            if partition is None:
                safe_set_full_optimizer_state(parameter, value, field)
            else:
                # DeepSpeed's own partitioning of a whole value leaves out the padding of the last partition.
                safe_set_local_optimizer_state(parameter, _own_part(value, partition.numel()), field)

    def make_room(self) -> None:
        """Allocate all moments, as the optimiser does at its first step.

        By default ZeRO-2 links parameters to their moments after the first step of its first group, and then finds no
        moments for the parameters of the other groups.
        """
        zero = self.zero
        for flat in flat_groups(zero):
            self.state[flat] = {"step": torch.tensor(0.0), **{field: torch.zeros_like(flat) for field in FIELDS}}
        if not is_zero_3(zero):
            link_moments(zero)


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
    """Return this process's partition of a flattened value; partitions have equal size, the last one is padded."""
    padded = value.new_zeros(size * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    return padded[size * torch.distributed.get_rank() :][:size]
