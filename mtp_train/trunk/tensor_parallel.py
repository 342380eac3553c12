"""Split a trunk over the processes that decode with it: each of them holds a part of every layer.

transformers' tensor-parallel plans cut linear layers and experts, and every process reads its own part of the
checkpoint only. Two kinds of rules are replaced (:func:`split_rules`):

- Embedding and output matrix stay whole, because heads read them.
- The outputs of attention projections are gathered. Attention, its masks and its caches are then those of one process,
  and the number of processes need not divide the number of key heads.

All processes of a group run the same loop on the same requests. The group's first process decides: the others take over
its drafts, its tokens and the numbers of tokens that it accepts (:meth:`ParallelGroup.follow`), so that differences in
rounding between processes cannot part them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mtp_train.errors import TrainingError

MESH_DIMS = ("group", "pp", "dp_replicate", "fsdp", "tp")
"""Groups of processes, and the dimensions that transformers reads from a mesh."""
_WHOLE = "replicate"
_GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input", "local_params": _WHOLE}
_CUT = ("colwise", "rowwise", "packed", "embedding")
"""Beginnings of the names of rules that cut a weight."""


@dataclass(frozen=True)
class ParallelGroup:
    """The processes that share one trunk.

    Args:
        mesh: A mesh of :data:`MESH_DIMS` over all processes of the launch.
        waiting: The processes of this group, connected by gloo, for messages that may take long to come.
    """

    mesh: DeviceMesh
    waiting: distributed.ProcessGroup

    @classmethod
    def of_size(cls, size: int, device: torch.device, patience: timedelta) -> ParallelGroup:
        """Return this process's group of neighbouring processes; every process of the launch must call it.

        Args:
            size: Number of processes of a group; it divides the number of all processes.
            device: This process's device.
            patience: How long a process waits for :meth:`said_by_first`.
        """
        world = distributed.get_world_size()
        mesh = init_device_mesh(device.type, (world // size, 1, 1, 1, size), mesh_dim_names=MESH_DIMS)
        groups = [list(range(start, start + size)) for start in range(0, world, size)]
        waiting, _ = distributed.new_subgroups_by_enumeration(groups, timeout=patience, backend="gloo")
        return cls(mesh, waiting)

    @property
    def size(self) -> int:
        """Number of processes of the group."""
        return self.mesh["tp"].size()

    @property
    def index(self) -> int:
        """Number of this group."""
        return self.mesh["group"].get_local_rank()

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.mesh["group"].size()

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of its group."""
        return self.mesh["tp"].get_local_rank() == 0

    @cached_property
    def _processes(self) -> distributed.ProcessGroup:
        return self.mesh["tp"].get_group()

    def follow(self, value: Tensor) -> Tensor:
        """Return the first process's values of a tensor; every process of the group must call it."""
        kept = value.clone(memory_format=torch.contiguous_format)
        if kept.numel():
            distributed.broadcast(kept, group=self._processes, group_src=0)
        return kept

    def said_by_first(self, message: Any = None) -> Any:
        """Return the first process's message; every process of the group must call it, the others without a message."""
        said = [message]
        distributed.broadcast_object_list(said, group=self.waiting, group_src=0)
        return said[0]

    def require_same(self, value: object, what: str) -> None:
        """Check that the processes of the group have equal values; every one of them must call it.

        Raises:
            TrainingError: They do not. Every process raises it.
        """
        found: list[object] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._processes)
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise TrainingError(
                f"tensor parallel: process {other} of a group got other {what} than its first process; expected the "
                "same, as they share one trunk. Give every process of a group the same arguments."
            )


def group_sizes(num_processes: int, per_node: int) -> list[int]:
    """Return the possible sizes of groups, ascending: parts of a node, or several whole nodes."""
    return [
        size
        for size in range(1, num_processes + 1)
        if num_processes % size == 0 and (per_node % size == 0 or size % per_node == 0)
    ]


def smallest_fitting(sizes: Sequence[int], part_bytes: Callable[[int], int], room_bytes: int) -> int:
    """Return the smallest size of a group whose processes have room for their parts; the largest if none has."""
    return next((size for size in sizes if part_bytes(size) <= room_bytes), sizes[-1])


def split_rules(model: Any) -> dict[str, str]:
    """Return the rules of a model's tensor-parallel plan that are replaced.

    Args:
        model: A transformers causal language model, possibly without weights.
    """
    parameters = {_generic(name) for name, _ in model.named_parameters()}
    whole = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {_generic(name) for name, module in model.named_modules() if any(module is one for one in whole)}
    rules = dict.fromkeys(names, _WHOLE)
    for name, rule in _plan_of(model).items():
        if "attn" in name and rule in _GATHERED:
            # A bare parameter, such as attention sinks, has no output to gather.
            rules[name] = _WHOLE if name in parameters else _GATHERED[rule]
    return {name: rule for name, rule in rules.items() if name in _plan_of(model)}


def part_bytes(model: Any, itemsize: int, size: int) -> int:
    """Return the bytes of one process's part of a model.

    Args:
        model: A transformers causal language model, possibly without weights.
        itemsize: Bytes of a number.
        size: Number of processes of the group.
    """
    plan = {**_plan_of(model), **split_rules(model)}
    numbers = 0
    for name, parameter in model.named_parameters():
        numbers += -(-parameter.numel() // size) if _is_cut(_generic(name), plan) else parameter.numel()
    return itemsize * numbers


def cuts_anything(model: Any) -> bool:
    """Return whether a model has a tensor-parallel plan that cuts its layers."""
    return part_bytes(model, 1, 2) < part_bytes(model, 1, 1)


def _is_cut(name: str, plan: Mapping[str, str]) -> bool:
    rule = plan.get(name) or plan.get(name.rpartition(".")[0], _WHOLE)
    return rule.startswith(_CUT)


def _plan_of(model: Any) -> Mapping[str, str]:
    plan: Mapping[str, str] | None = model.tp_plan
    return plan or {}


def _generic(name: str) -> str:
    """Return the name of a module or a parameter with ``*`` for the numbers of layers, as plans name it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
