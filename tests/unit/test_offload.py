"""Layers in main memory or on disk: the same numbers, and between forwards nothing on the device."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate.utils import DistributedType

from adapters import write_adapter
from checkpoints import save_stripped
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError, RecipeError, TrainingError
from mtp_train.runs.refusals import require_offload
from mtp_train.runs.trunks import load_run_trunk
from mtp_train.trunk.load import Trunk, load_trunk
from runs import tiny_recipe
from scripted import random_prompt
from tiny import tiny_trunk

CPU = torch.device("cpu")


def devices(module: torch.nn.Module) -> set[str]:
    return {parameter.device.type for parameter in module.parameters()}


def offloaded(trunk: Trunk) -> Trunk:
    trunk.requires_grad_(False).offload_layers(CPU)
    return trunk


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_offloaded_layers_compute_in_another_dtype_than_they_are_held_in(held: torch.dtype) -> None:
    other = torch.bfloat16 if held is torch.float32 else torch.float32
    whole = tiny_trunk("qwen3_5").to(held)
    parted = offloaded(tiny_trunk("qwen3_5").to(held))
    tokens_BT = torch.tensor([random_prompt(9)])
    with whole.computing_in(other), parted.computing_in(other):
        assert torch.equal(parted.hidden(tokens_BT), whole.hidden(tokens_BT))
    assert {value.dtype for value in parted.layers.parameters()} == {held}
    assert devices(parted.layers) == {"meta"}


def test_what_moves_a_model_leaves_offloaded_layers_alone() -> None:
    trunk = offloaded(tiny_trunk("qwen3_5"))
    holder = torch.nn.ModuleList([trunk, torch.nn.Linear(2, 2)])
    holder.to(torch.float64)
    assert (trunk.lm_head_VD.dtype, holder[1].weight.dtype) == (torch.float32, torch.float64)
    trunk.hidden(torch.tensor([random_prompt(5)]))
    assert devices(trunk.layers) == {"meta"}


@torch.inference_mode()
def test_an_adapter_is_offloaded_with_the_layers_that_wear_it(tmp_path: Path) -> None:
    path = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "trunk")
    write_adapter(path, tmp_path / "lora", target_modules=["q_proj", "down_proj"])
    checkpoint = open_checkpoint(path)
    tokens_BT = torch.tensor([random_prompt(9)])
    trunk = load_trunk(checkpoint, dtype=torch.float32, adapter=tmp_path / "lora")
    plain = load_trunk(checkpoint, dtype=torch.float32).hidden(tokens_BT)
    expected = trunk.hidden(tokens_BT)
    assert not torch.equal(plain, expected)
    assert torch.equal(offloaded(trunk).hidden(tokens_BT), expected)


def test_a_wrapper_around_one_process_is_refused_too(tmp_path: Path) -> None:
    run = Mock(recipe=tiny_recipe(tmp_path, tmp_path / "run", model__offload="cpu"))
    run.accelerator.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(TrainingError, match=r"model\.offload: cpu, and the launcher asks for DEEPSPEED; expected one"):
        load_run_trunk(run, torch.float32)


def test_several_processes_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    require_offload(1, Checkpoint(tmp_path, {}, None, {}))
    with pytest.raises(RecipeError, match=r"model\.offload: cpu, with 2 processes; expected one process\. Launch with"):
        require_offload(2, Checkpoint(tmp_path, {}, None, {}))
    with pytest.raises(CheckpointError, match=r"quantised with fp8, while model\.offload is cpu; expected plain"):
        require_offload(1, Checkpoint(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, None, {}))
