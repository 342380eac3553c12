"""Tiny trunks loaded in shards and as a whole, under whatever launcher started this; a file gets what they differ in.

``DAMAGED=RANK`` in the environment gives that process a truncated copy of the first checkpoint, and the file gets the
error of each process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import core_model_loading

from checkpoints import save_stripped
from cpu_shards import asked_of_this_process, pretend_to_have_gpus
from mtp_train.errors import CheckpointError
from mtp_train.train.launch import RunAccelerator, make_accelerator
from mtp_train.train.shard import layer_sharder
from mtp_train.trunk.load import Trunk, load_trunk
from tiny import family_of, tiny_trunk

TIED = ", tied"


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensors: Iterator[Tensor]) -> int:
    """Return the bytes of this process's parts of tensors, each counted once."""
    parts = {id(tensor): own_part(tensor) for tensor in tensors if not tensor.is_meta}
    return sum(part.numel() * part.element_size() for part in parts.values())


class Peak:
    """The most bytes of parameters that a model and its loader hold at once, whole ones and shards together."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole: list[Callable[[], Tensor | None]] = []

    def look(self, model: Any) -> None:
        """Count the model's parameters, and the whole ones of before that something still refers to."""
        alive = [tensor for one in self._whole if (tensor := one()) is not None]
        self.bytes = max(self.bytes, num_bytes(iter([*alive, *model.parameters()])))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after every parameter that transformers sets."""
        stock = core_model_loading.set_param_for_module

        def set_and_look(model: Any, name: str, *given: Any) -> None:
            stock(model, name, *given)
            if name in dict(model.named_parameters()):
                self._whole.append(weakref.ref(model.get_parameter(name)))
            self.look(model)

        core_model_loading.set_param_for_module = set_and_look
        try:
            yield
        finally:
            core_model_loading.set_param_for_module = stock


def named_tensors(trunk: Trunk) -> dict[str, Tensor]:
    """Return this process's parts of all parameters and buffers, by name."""
    model = trunk.causal_lm
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: own_part(tensor) for name, tensor in named}


def differences(found: Trunk, expected: Trunk) -> list[str]:
    """Return the names of parameters and buffers that differ in anything."""
    ours, theirs = named_tensors(found), named_tensors(expected)
    placed = {name: getattr(one, "placements", None) for name, one in found.causal_lm.named_parameters()}
    return [
        *sorted(ours.keys() ^ theirs.keys()),
        *(
            name
            for name, one in expected.causal_lm.named_parameters()
            if placed.get(name) != getattr(one, "placements", None)
            or one.requires_grad != found.causal_lm.get_parameter(name).requires_grad
        ),
        *(
            name
            for name in ours.keys() & theirs.keys()
            if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
        ),
    ]


def sharded_afterwards(directory: Path, name: str, dtype: torch.dtype, peak: Peak) -> Trunk:
    """Load a whole trunk, then shard its layers: what processes did before, and still do with an adapter."""
    with peak.watching():
        trunk = load_trunk(directory, family_of(name), dtype=dtype)
    for layer in trunk.layers:
        fully_shard(layer, reshard_after_forward=True)
    return trunk


def sharded_while_loading(directory: Path, name: str, dtype: torch.dtype, peak: Peak, accelerator: Any) -> Trunk:
    """Load a trunk in shards."""
    with peak.watching():
        return load_trunk(directory, family_of(name), dtype=dtype, on_layer=layer_sharder(accelerator))


def layer_bytes(module: nn.Module, itemsize: int) -> int:
    """Return the bytes of a whole module."""
    return itemsize * sum(parameter.numel() for parameter in module.parameters())


def compare(case: str, directory: Path, dtype: torch.dtype, accelerator: RunAccelerator) -> dict[str, Any]:
    """Return in what a trunk loaded in shards differs from one that is sharded afterwards, and both peaks."""
    name = case.removesuffix(TIED)
    whole = tiny_trunk(name, tied=case.endswith(TIED))
    if accelerator.is_main_process:
        save_stripped(whole, directory / case)
    accelerator.wait_for_everyone()
    before, now = Peak(), Peak()
    expected = sharded_afterwards(directory / case, name, dtype, before)
    found = sharded_while_loading(directory / case, name, dtype, now, accelerator)
    layers = [layer_bytes(layer, dtype.itemsize) for layer in whole.layers]
    return {
        "differences": differences(found, expected),
        "whole": layer_bytes(whole, dtype.itemsize),
        "layer": max(layers),
        "shard": num_bytes(found.parameters()),
        "before": before.bytes,
        "now": now.bytes,
        "sharded": sum(isinstance(one, DTensor) for one in found.layers.parameters()),
        "unsharded": sum(not isinstance(one, DTensor) for one in found.layers.parameters()),
    }


def damaged(case: str, directory: Path, accelerator: RunAccelerator) -> dict[str, Any]:
    """Return the error of each process where one has a truncated file."""
    if accelerator.is_main_process:
        save_stripped(tiny_trunk(case), directory / case)
    accelerator.wait_for_everyone()
    path = directory / f"{case}-{accelerator.process_index}"
    shutil.copytree(directory / case, path)
    if asked_of_this_process("DAMAGED") is not None:
        file = next(path.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size - 64)
    said = "no error"
    try:
        with accelerator.failing_together():
            load_trunk(path, family_of(case), dtype=torch.float32, on_layer=layer_sharder(accelerator))
    except CheckpointError as error:
        said = str(error)
    return {"errors": accelerator.gather_items([said])}


def measure(cases: Sequence[str], directory: Path, accelerator: RunAccelerator) -> dict[str, Any]:
    """Return what each process finds, by case."""
    if "DAMAGED" in os.environ:
        return damaged(cases[0], directory, accelerator)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        f"{case}, {dtype}": accelerator.gather_items([compare(case, directory, dtypes[dtype], accelerator)])
        for case in cases
        for dtype in dtypes
    }


if __name__ == "__main__":
    pretend_to_have_gpus()
    joined = make_accelerator()
    into, *wanted = sys.argv[1:]
    result = measure(wanted, Path(into).parent, joined)
    if joined.is_main_process:
        Path(into).write_text(json.dumps(result))
    joined.wait_for_everyone()
    # gloo may abort a process in its orderly exit; what the processes found is written.
    os._exit(0)
