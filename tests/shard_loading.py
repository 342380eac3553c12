"""Tiny trunks that processes load in shards, and whole; a file gets what each process found.

The trunks are compared, and the bytes that loading holds at once are counted. The first checkpoint is loaded once more,
with a truncated file in the last process.
"""

from __future__ import annotations

import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import core_model_loading

from checkpoints import save_stripped
from cpu_shards import pretend_to_have_gpus
from json_files import write_json
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import CheckpointError
from mtp_train.train.launch import RunAccelerator, make_accelerator
from mtp_train.train.shard import layer_sharder
from mtp_train.train.stopping import leave
from mtp_train.trunk.load import Trunk, load_trunk
from tiny import tiny_trunk

TIED, HALF = ", tied", ", bfloat16"
"""Ends of a case's name, which begins with the family's."""


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
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
        self.bytes = max(self.bytes, num_bytes([*alive, *model.parameters()]))

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


def described(trunk: Trunk) -> dict[str, tuple[Any, ...]]:
    """Return how each parameter and buffer is held, with this process's part of it, by name."""
    model = trunk.causal_lm
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (getattr(one, "placements", None), one.shape, one.dtype, one.requires_grad, own_part(one).tolist())
        for name, one in named
    }


def differences(found: Trunk, expected: Trunk) -> list[str]:
    """Return the names of parameters and buffers that differ in anything."""
    ours = described(found)
    theirs = described(expected)
    return [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


def change_one(trunk: Trunk) -> str:
    """Change one number of this process's part of a layer, and return the parameter's name."""
    name, parameter = next(one for one in trunk.causal_lm.named_parameters() if isinstance(one[1], DTensor))
    parameter.to_local().view(-1)[:1].add_(1.0)
    return name


def sharded_afterwards(directory: Path, dtype: torch.dtype, peak: Peak) -> Trunk:
    """Load a whole trunk, then shard its layers: what processes did before, and still do with an adapter."""
    with peak.watching():
        trunk = load_trunk(open_checkpoint(directory), dtype=dtype)
    for layer in trunk.layers:
        fully_shard(layer, reshard_after_forward=True)
    return trunk


def sharded_while_loading(directory: Path, dtype: torch.dtype, peak: Peak, accelerator: Any) -> Trunk:
    """Load a trunk in shards."""
    with peak.watching():
        return load_trunk(open_checkpoint(directory), dtype=dtype, on_layer=layer_sharder(accelerator))


def whole_bytes(module: nn.Module) -> int:
    """Return the bytes of a module, sharded or not, in all processes together."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def compare(case: str, directory: Path, accelerator: RunAccelerator) -> dict[str, Any]:
    """Return in what a trunk loaded in shards differs from one that is sharded afterwards, and both peaks."""
    name = case.split(", ")[0]
    dtype = torch.bfloat16 if case.endswith(HALF) else torch.float32
    whole = tiny_trunk(name, tied=case.endswith(TIED))
    if accelerator.is_main_process:
        save_stripped(whole, directory / case)
    accelerator.wait_for_everyone()
    before = Peak()
    now = Peak()
    expected = sharded_afterwards(directory / case, dtype, before)
    found = sharded_while_loading(directory / case, dtype, now, accelerator)
    unequal = differences(found, expected)
    return {
        "differences": unequal,
        "changed": [change_one(found)],
        "then_different": differences(found, expected),
        "whole": whole_bytes(expected),
        "layer": max(map(whole_bytes, expected.layers)),
        "shard": num_bytes(found.parameters()),
        "before": before.bytes,
        "now": now.bytes,
        "sharded": sum(isinstance(one, DTensor) for one in found.layers.parameters()),
        "unsharded": sum(not isinstance(one, DTensor) for one in found.layers.parameters()),
    }


def damaged(case: str, directory: Path, accelerator: RunAccelerator) -> list[str]:
    """Return the error of each process where the last one has a truncated file."""
    path = directory / case
    is_last = accelerator.process_index == accelerator.num_processes - 1
    if is_last:
        path = Path(shutil.copytree(path, directory / "damaged"))
    checkpoint = open_checkpoint(path)
    # Reads the headers.
    assert checkpoint.mlx_sign is None
    if is_last:
        file = next(path.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size - 64)
    said = "no error"
    try:
        with accelerator.failing_together():
            load_trunk(checkpoint, dtype=torch.float32, on_layer=layer_sharder(accelerator))
    except CheckpointError as error:
        said = str(error)
    return accelerator.gather_items([said])


if __name__ == "__main__":
    pretend_to_have_gpus()
    joined = make_accelerator()
    into, *wanted = sys.argv[1:]
    beside = Path(into).parent
    compared = {case: joined.gather_items([compare(case, beside, joined)]) for case in wanted}
    result = {"compared": compared, "errors": damaged(wanted[0], beside, joined)}
    if joined.is_main_process:
        write_json(Path(into), result)
    joined.wait_for_everyone()
    leave(0)
