"""The trunk in shards: each process holds a part of every layer and borrows the rest while the layer runs.

The layers are units of their own, so that no more than one or two are whole at a time. What is left - embedding, output
matrix, norms and the head - is whole during a step: embedding and output matrix are read outside of their modules'
forward, and the head is what every process trains.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtp_train.errors import TrainingError
from mtp_train.heads.isolate import isolated_hidden
from mtp_train.heads.trunk import Trunk
from mtp_train.train.module import HeadTraining

_SHARDED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def shards_trunk(accelerator: Accelerator) -> bool:
    """Say whether the trunk is in shards while training (FSDP2, ZeRO-3): no process can then decode with it."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        stage: int = accelerator.state.deepspeed_plugin.zero_stage
        return stage == 3
    return accelerator.distributed_type is DistributedType.FSDP


def shard_layers(module: HeadTraining, accelerator: Accelerator) -> None:
    """Shard the trunk's layers in place, one after the other, from wherever its weights lie.

    accelerate's ``prepare`` does the rest. Its own policies know classes only, and a head's layer is often of the
    trunk's class.

    Raises:
        TrainingError: The trunk is quantised.
    """
    trunk = module.trunk
    _make_ready(trunk, accelerator)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _partition(module, accelerator)
        return
    from torch.distributed.fsdp import fully_shard

    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = None
    for layer in trunk.layers:
        fully_shard(layer, reshard_after_forward=plugin.reshard_after_forward)


class HiddenInShards(nn.Module):
    """Runs a trunk in shards, for its hidden states alone; the module that the shards are gathered below.

    Args:
        trunk: The trunk, from wherever its weights lie; its layers are sharded in place, the rest goes to the device.
        accelerator: Says which device.

    Raises:
        TrainingError: The trunk is quantised.
    """

    def __init__(self, trunk: Trunk, accelerator: Accelerator) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        self.trunk = trunk
        _make_ready(trunk, accelerator)
        # By torch under DeepSpeed too, whose engine holds on to every module that it was ever given: these layers are
        # let go of before training.
        for layer in trunk.layers:
            fully_shard(layer, reshard_after_forward=True)
        trunk.to(accelerator.device)
        fully_shard(self, ignored_params=set(self.parameters()))

    def forward(self, tokens_BT: Tensor, document_BT: Tensor, max_tokens: int) -> Tensor:
        """Return what ``isolated_hidden`` returns; every process must call it."""
        return isolated_hidden(self.trunk, tokens_BT, document_BT, max_tokens)


def _make_ready(trunk: Trunk, accelerator: Accelerator) -> None:
    packed = [name for name, parameter in trunk.named_parameters() if parameter.dtype not in _SHARDED_DTYPES]
    if packed:
        raise TrainingError(
            f"model.trunk: quantised ({packed[0]} and {len(packed) - 1} more); expected weights that can be cut "
            "anywhere. Launch with recipes/accelerate/ddp.yaml or zero2.yaml, which keep the trunk whole."
        )
    trunk.calls_together = functools.partial(most_of_all, device=accelerator.device)


def _partition(module: HeadTraining, accelerator: Accelerator) -> None:
    import deepspeed
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    trunk, head = module.trunk, module.head
    for layer in trunk.layers:
        # Fetched as a whole: what a mixture's experts run on differs between processes, what they fetch must not.
        set_z3_leaf_module(layer, True)
    deepspeed.zero.Init(
        module=trunk, config_dict_or_path=accelerator.state.deepspeed_plugin.deepspeed_config, dtype=torch.float32
    )
    # DeepSpeed takes a module with partitions for one that is where it belongs.
    head.to(accelerator.device)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    for matrix_VD in [trunk.lm_head_VD, *(head.own_lm_heads(module.num_depths) or [])]:
        deepspeed.zero.register_external_parameter(module, matrix_VD)


def give_up_shards(trunk: Trunk, accelerator: Accelerator) -> None:
    """Let go of what training held, to make room for a whole trunk; the caller gives up its own references."""
    accelerator.free_memory()
    for parameter in trunk.parameters():
        # DeepSpeed's hooks keep the module alive for good, and with it its share of the weights.
        if hasattr(parameter, "ds_tensor"):
            parameter.data = parameter.ds_tensor.data = parameter.new_empty(0)


def most_of_all(count: int, device: torch.device) -> int:
    """Return the largest count of all processes."""
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor put together from its shards; every process must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state with every tensor whole; every process must ask for it."""
    partitioned: list[Any] = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not partitioned:
        return {name: whole(value) for name, value in module.state_dict().items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        return {name: value.clone() for name, value in module.state_dict().items()}
