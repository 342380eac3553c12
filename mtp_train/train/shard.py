"""Shard the trunk: each process holds a part of every layer and gathers the rest while the layer runs.

Each layer is a unit of its own, so at most two layers are whole at a time. Embedding, output matrix, norms and the head
are whole during a step: embedding and output matrix are read outside of their modules' forward, and every process
trains the whole head. Under FSDP2 the trunk's ends are whole all the time, as shards of them would be gathered in each
micro-batch and lower no peak of memory. The head is gathered once in a micro-batch (:func:`shard_head`).

Under FSDP2 the layers are sharded while the trunk is loaded (:func:`layer_sharder`): a process holds one whole layer in
main memory, besides embedding, output matrix and norms. Trunks with an adapter, quantised trunks and DeepSpeed need the
whole trunk in main memory.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mtp_train.errors import TrainingError
from mtp_train.heads.experts import is_stacked
from mtp_train.heads.lora import is_lora
from mtp_train.train.head_training import HeadTraining
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.load import OnLayer, Trunk
from mtp_train.trunk.states import Forwards, Shares, TrunkStates
from mtp_train.upstream.deepspeed_private import fetch_as_a_whole, is_partitioned, partition_of

_SHARDED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def shards_trunk(accelerator: Accelerator) -> bool:
    """Return whether the trunk is in shards in training (FSDP2, ZeRO-3), so that no process can decode with it."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        return accelerator.state.deepspeed_plugin.zero_stage == 3
    return accelerator.distributed_type is DistributedType.FSDP


def layer_sharder(accelerator: Accelerator) -> OnLayer:
    """Return the function that shards a layer while its trunk is loaded; None for DeepSpeed, which shards trunks."""
    if accelerator.distributed_type is not DistributedType.FSDP:
        return None
    return functools.partial(fully_shard, reshard_after_forward=accelerator.state.fsdp_plugin.reshard_after_forward)


def shard_layers(module: HeadTraining, accelerator: Accelerator) -> None:
    """Shard the trunk's layers in place, one after the other, from any device; skip those that are in shards already.

    accelerate's own policies select modules by class, and a head's layer often has the class of the trunk's layers.
    """
    trunk = module.ends
    require_plain(trunk)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _partition(module, accelerator)
        return
    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = None
    _shard_all(trunk, accelerator, reshard_after_forward=plugin.reshard_after_forward)
    module.to(accelerator.device)


def shard_head(module: HeadTraining) -> dict[nn.Parameter, nn.Parameter]:
    """Shard the head under FSDP2, and return the shards by the whole parameters that an optimiser has.

    The head is gathered at the start of a forward, once for all depths, and kept until the backward pass is over.
    Weights that products in bf16 round first are gathered rounded, 2 bytes each, and their gradients summed in fp32. In
    fp32 each takes 4; accelerate before 1.14 gathers it once more in the backward pass, which makes 8. The unit is not
    the decoder layer: its norms are computed in fp32, and a forward that gathers would do so for every depth. With
    LoRA all is gathered in fp32, as peft adds LoRA's products to experts.
    """
    whole = list(module.head.parameters())
    kept = set(module.states.parameters())
    if module.compute_dtype is not torch.float32 and not any(is_lora(name) for name in module.head.state_dict()):
        rounded = nn.Sequential(*(part for name, part in module.head.named_modules() if _is_rounded(name, part)))
        policy = MixedPrecisionPolicy(module.compute_dtype, torch.float32, cast_forward_inputs=False)
        unit = fully_shard(rounded, mp_policy=policy, reshard_after_forward=False)
        kept.update(rounded.parameters())
        # torch looks for units among the submodules.
        module.add_module("rounded", rounded)
        module.register_forward_pre_hook(lambda *_: unit.unshard())
    fully_shard(module, reshard_after_forward=False, ignored_params=kept)
    return dict(zip(whole, module.head.parameters(), strict=True))


def _is_rounded(name: str, module: nn.Module) -> bool:
    """Return whether autocast rounds all weights of a module."""
    return isinstance(module, nn.Linear) or any(
        is_stacked(one, weight.shape) for one, weight in module.named_parameters(name, recurse=False)
    )


def _shard_all(trunk: Ends, accelerator: Accelerator, *, reshard_after_forward: bool) -> None:
    for layer in trunk.layers:
        if isinstance(layer, FSDPModule):
            layer.set_reshard_after_forward(reshard_after_forward)
        else:
            fully_shard(layer, reshard_after_forward=reshard_after_forward)
        # Buffers that no checkpoint has were computed in main memory, after the layer was sharded.
        for buffer in layer.buffers():
            buffer.data = buffer.data.to(accelerator.device)


def gather_in(module: nn.Module, trunk: Trunk, accelerator: Accelerator) -> None:
    """Shard the trunk's layers, unless they are in shards, to gather them in the forward of a module around them.

    For hidden states alone: in training, the layers are gathered in the forward of the module that accelerate wraps.
    Every process must make each forward. Under DeepSpeed torch shards the layers here: its engine never releases a
    module, and these are released before training.

    Raises:
        TrainingError: The trunk is quantised.
    """
    require_plain(trunk)
    _shard_all(trunk, accelerator, reshard_after_forward=True)
    trunk.to(accelerator.device)
    fully_shard(module, ignored_params=set(module.parameters()))


class ShardedStates(TrunkStates):
    """States of a trunk in shards: every process makes as many passes as the one that needs most."""

    def prepare(self, shares: Shares, rank: int, max_tokens: int | None = None) -> Forwards:
        plans = [super(ShardedStates, self).prepare(shares, one, max_tokens) for one in range(len(shares))]
        return plans[rank] + [[]] * (max(map(len, plans)) - len(plans[rank]))

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Do nothing: shards are gathered in the dtype that they are held in."""
        return nullcontext()


def require_plain(trunk: Ends) -> None:
    packed = [name for name, parameter in trunk.named_parameters() if parameter.dtype not in _SHARDED_DTYPES]
    if packed:
        raise TrainingError(
            f"model.trunk: quantised ({packed[0]} and {len(packed) - 1} more); expected weights that can be cut "
            "anywhere. Launch with ddp.yaml or zero2.yaml, which keep the trunk whole."
        )


def _partition(module: HeadTraining, accelerator: Accelerator) -> None:
    import deepspeed

    trunk = module.ends
    for layer in trunk.layers:
        # Gather each layer as a whole: processes use different experts, but have to gather the same weights.
        fetch_as_a_whole(layer)
    deepspeed.zero.Init(
        module=trunk, config_dict_or_path=accelerator.state.deepspeed_plugin.deepspeed_config, dtype=torch.float32
    )
    # DeepSpeed does not move modules with partitions to the device.
    module.head.to(accelerator.device)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    for matrix_VD in [trunk.lm_head_VD, *(module.head.own_lm_heads(module.num_depths) or [])]:
        deepspeed.zero.register_external_parameter(module, matrix_VD)


def give_up_shards(trunk: Trunk, accelerator: Accelerator) -> None:
    """Release the memory of training to make room for a whole trunk; the caller has to drop its own references."""
    accelerator.free_memory()
    for parameter in trunk.parameters():
        # DeepSpeed's hooks keep the module alive for good, and with it this process's shard of the weights.
        partition = partition_of(parameter)
        if partition is not None:
            parameter.data = partition.data = parameter.new_empty(0)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from its shards; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state dict with every tensor gathered; every process must call it."""
    partitioned: list[Any] = [parameter for parameter in module.parameters() if is_partitioned(parameter)]
    if not partitioned:
        return {name: whole(value) for name, value in module.state_dict().items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        return {name: value.clone() for name, value in module.state_dict().items()}
