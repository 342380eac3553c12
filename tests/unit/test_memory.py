"""Running out of memory names the setting to change, and nothing else is taken for it; so does too small a GPU."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_recipe import SMALLEST

from mtp_train.errors import OutOfMemoryError, RecipeError
from mtp_train.recipe.loading import load_recipe, parse_yaml
from mtp_train.runs import trunks
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.inputs import gather_inputs
from mtp_train.runs.run import Run, memory_is_named
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.trunks import require_room
from mtp_train.train.machine import Device
from mtp_train.trunk.load import load_trunk
from runs import tiny_recipe

CUDA = (
    "CUDA out of memory. Tried to allocate 7.58 GiB. GPU 0 has a total capacity of 23.57 GiB of which 4.12 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096 bytes."
)


@pytest.mark.parametrize(
    ("stage", "cure"),
    [
        ("check", "Write model.dtype: bfloat16, or model.offload: cpu; or launch with recipes/accelerate/fsdp2"),
        ("data", "Lower data.regenerate.batch_size or data.regenerate.max_new_tokens. Write model.dtype: bfloat16"),
        ("train", "Write train.micro_batch_sequences: 1, then train.gradient_checkpointing: true"),
        ("evaluate", "Lower evaluate.dense_tokens, evaluate.max_new_tokens or study.batch"),
    ],
)
def test_the_settings_that_help_are_named(stage: str, cure: str) -> None:
    with pytest.raises(OutOfMemoryError) as found, memory_is_named(lambda: stage):
        raise torch.OutOfMemoryError(CUDA)
    message = str(found.value)
    assert message.startswith(
        f"stage '{stage}': out of memory (CUDA out of memory. Tried to allocate 7.58 GiB); expected it to suffice. "
    )
    assert cure in message
    recipe = load_recipe(SMALLEST, ["data.regenerate={}"])
    for field, value in re.findall(r"([a-z_]+\.[a-z_]+): (\w+)", message):
        assert attrgetter(field)(load_recipe(recipe, [f"{field}={value}"])) == parse_yaml(value, field)
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError()])
def test_a_machine_is_full_in_other_words(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match="out of memory"), memory_is_named(lambda: "train"):
        raise error


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), memory_is_named(lambda: "train"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_a_trunk_that_no_gpu_can_decode_with_is_refused_before_it_is_loaded(
    pristine: Path, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    judged = tiny_recipe(pristine, new_run, model__dtype="float32")
    gathered = gather_inputs(judged, 1, quiet_progress(), judges=True)
    run = Run(judged, RunDirectory(new_run), gathered, accelerator, quiet_progress())
    trunk = load_trunk(gathered.finetune, dtype="float32")
    weights = sum(one.numel() for one in trunk.parameters())
    for size, refused in ((4 * weights, True), (20 * weights, False)):
        monkeypatch.setattr(trunks, "device_named", lambda _, size=size: Device("small", "cuda", size))
        with pytest.raises(RecipeError, match=r"Use a larger GPU") if refused else contextlib.nullcontext():
            require_room(run)
        require_room(replace(run, recipe=judged.replaced({"gate.enabled": False})))
