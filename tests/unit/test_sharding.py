"""The launcher's settings are compared with accelerate's state; all processes run a trunk in shards together."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn
from transformers import core_model_loading

from checkpoints import save_stripped, save_tensors
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.errors import CheckpointError, LostProcessError, TrainingError
from mtp_train.runs import trunks
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.launch import (
    lost_process_is_named,
    make_accelerator,
    prepare,
    require_as_asked,
    require_processes,
)
from mtp_train.train.shard import ShardedStates, gather_in, shard_layers, shards_trunk
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.trunk.states import TrunkStates, group_by_length, isolated_hidden, segments
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk


def joined(kind: DistributedType, **plugins: Any) -> Any:
    """Return what the checks read of an accelerator of two processes."""
    return SimpleNamespace(
        num_processes=2, distributed_type=kind, state=SimpleNamespace(**plugins), device=torch.device("cpu")
    )


FSDP = {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}


def zero(stage: int) -> dict[str, Any]:
    return {"deepspeed_plugin": SimpleNamespace(zero_stage=stage)}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(
    ("variable", "given", "in_shards"),
    [
        ("", joined(DistributedType.MULTI_GPU), False),
        ("ACCELERATE_USE_FSDP", joined(DistributedType.FSDP, **FSDP), True),
        ("ACCELERATE_USE_DEEPSPEED", joined(DistributedType.DEEPSPEED, **zero(2)), False),
        ("ACCELERATE_USE_DEEPSPEED", joined(DistributedType.DEEPSPEED, **zero(3)), True),
    ],
)
def test_what_was_asked_for_passes(variable: str, given: Any, in_shards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv(variable, "true")
    require_as_asked(given)
    assert shards_trunk(given) is in_shards


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(
    ("variable", "given", "message"),
    [
        ("ACCELERATE_USE_FSDP", joined(DistributedType.MULTI_CPU), "asks for FSDP, accelerate gives MULTI_CPU"),
        ("ACCELERATE_USE_DEEPSPEED", joined(DistributedType.MULTI_CPU), "asks for DEEPSPEED, accelerate gives MULTI"),
        (
            "ACCELERATE_USE_FSDP",
            joined(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=1)),
            "asks for FSDP 1; expected FSDP 2",
        ),
        (
            "ACCELERATE_USE_DEEPSPEED",
            joined(DistributedType.DEEPSPEED, **zero(1)),
            "asks for ZeRO stage 1; expected 2 or 3",
        ),
        ("", SimpleNamespace(num_processes=1), "started 2 processes, of which accelerate joins 1"),
    ],
)
def test_what_was_not_asked_for_is_refused(
    variable: str, given: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "true")
    with pytest.raises(TrainingError, match=message):
        require_as_asked(given)


def test_another_number_of_processes_than_the_recipe_s_is_refused() -> None:
    two = joined(DistributedType.MULTI_CPU)
    require_processes(None, two)
    require_processes(2, two)
    with pytest.raises(
        TrainingError,
        match=r"^train\.processes: 4, and the launcher started 2; .* --num_processes 4",
    ):
        require_processes(4, two)


def test_deepspeed_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(TrainingError, match=r"not installed; expected it\. Run pip install \"mtp-train\[deepspeed"):
        make_accelerator()


def training_module() -> HeadTraining:
    trunk = tiny_trunk("qwen3_5")
    return HeadTraining(TrunkStates(trunk), tiny_head(trunk), num_depths=1, kind="kl", temperature=1.0)


def test_processes_that_nothing_wraps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = training_module()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(module.head.parameters())
    plan: Any = None
    assert prepare(module, optimizer, accelerator, plan, 1.0)[0] is module
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(TrainingError, match=r"2 processes \(NO\), and accelerate wrapped nothing"):
        prepare(module, optimizer, accelerator, plan, 1.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_quantised_trunk_is_not_sharded(dtype: torch.dtype) -> None:
    module = training_module()
    module.ends.decoder.norm.weight = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    message = r"quantised \(.*norm\.weight and 0 more\); .* Launch with ddp\.yaml"
    accelerator = joined(DistributedType.FSDP, **FSDP)
    alone = ShardedStates(cast(Trunk, module.ends))
    for cuts in (lambda: shard_layers(module, accelerator), lambda: gather_in(alone, alone.ends, accelerator)):
        with pytest.raises(TrainingError, match=message):
            cuts()


def test_each_layer_is_handed_over_before_the_next_one_is_read(tmp_path: Path) -> None:
    trunk = tiny_trunk("qwen3_5")
    path = save_stripped(trunk, tmp_path / "trunk")
    shapes: list[dict[str, torch.Size]] = []

    def take(layer: nn.Module) -> None:
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        shapes.append({name: parameter.shape for name, parameter in layer.named_parameters()})
        # What a sharder does: the layer keeps a part of each parameter.
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter[:1].clone(), requires_grad=False))

    loaded = load_trunk(open_checkpoint(path), dtype=torch.float32, on_layer=take)
    assert shapes == [{name: one.shape for name, one in layer.named_parameters()} for layer in trunk.layers]
    # The parts are as they were left: nothing was initialised or loaded once more.
    for ours, theirs in zip(loaded.layers, trunk.layers, strict=True):
        for name, one in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), one[:1]), name
    for name, buffer in trunk.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer), name
    assert torch.equal(loaded.lm_head_VD, trunk.lm_head_VD)


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_a_layer_that_is_not_whole_is_not_handed_over(change: str, tmp_path: Path) -> None:
    trunk = tiny_trunk("qwen3_5")
    path = save_stripped(trunk, tmp_path / "trunk")
    tensors = load_file(path / SINGLE_FILE)
    key = next(key for key in tensors if key.endswith("layers.1.input_layernorm.weight"))
    tensors[key] = tensors[key][:-1].clone()
    if change == "missing":
        del tensors[key]
    save_tensors(tensors, path / SINGLE_FILE)
    taken: list[nn.Module] = []
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm\.weight"):
        load_trunk(open_checkpoint(path), dtype=torch.float32, on_layer=taken.append)
    assert len(taken) == len(trunk.layers) - 1


def test_a_broken_load_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "trunk")
    checkpoint = open_checkpoint(path)
    stock = core_model_loading.set_param_for_module

    def fail(_layer: nn.Module) -> None:
        raise KeyboardInterrupt

    for asked in (None, "0"):
        if asked is not None:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", asked)
        with pytest.raises(KeyboardInterrupt):
            load_trunk(checkpoint, dtype=torch.float32, on_layer=fail)
        assert core_model_loading.set_param_for_module is stock
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == asked
    size = (path / SINGLE_FILE).stat().st_size
    os.truncate(path / SINGLE_FILE, size - 64)
    with pytest.raises(CheckpointError, match=r"a file of the trunk cannot be read .*; expected whole safetensors"):
        load_trunk(checkpoint, dtype=torch.float32)


PLAIN: dict[str, Any] = {"adapter": None, "quantization": None, "config": {}}


@pytest.mark.parametrize(
    ("kind", "to_shard", "given", "is_handed_over"),
    [
        (DistributedType.FSDP, True, {}, True),
        (DistributedType.FSDP, False, {}, False),
        (DistributedType.DEEPSPEED, True, {}, False),
        (DistributedType.FSDP, True, {"adapter": Path("lora")}, False),
        (DistributedType.FSDP, True, {"quantization": "8bit"}, False),
        (DistributedType.FSDP, True, {"config": {"quantization_config": {"quant_method": "fp8"}}}, False),
    ],
)
def test_only_plain_trunks_under_fsdp2_are_sharded_while_they_are_loaded(
    kind: DistributedType, to_shard: bool, given: dict[str, Any], is_handed_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {**PLAIN, **given}
    recipe: Any = SimpleNamespace(
        model=SimpleNamespace(offload=None, trunk="t", quantization=one["quantization"]),
    )
    finetune = SimpleNamespace(config=one["config"], path=Path("t"), family=None, num_bytes=0, trusts_code=False)
    inputs: Any = SimpleNamespace(adapter=one["adapter"], finetune=finetune)
    plugins = zero(3) | {"fsdp_plugin": SimpleNamespace(fsdp_version=2, reshard_after_forward=True)}
    accelerator = joined(kind, **plugins)
    accelerator.failing_together = nullcontext
    monkeypatch.setattr(trunks, "load_trunk", lambda _checkpoint, **settings: settings)
    no_bar: Any = SimpleNamespace(add_task=lambda *_args, **_kwargs: 0, remove_task=lambda _task: None)
    run: Any = SimpleNamespace(recipe=recipe, inputs=inputs, accelerator=accelerator, progress=no_bar)
    settings: Any = trunks.load_run_trunk(run, torch.float32, to_shard=to_shard)
    assert (settings["on_layer"] is not None) is is_handed_over


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_spare_forwards_change_nothing(family_name: str) -> None:
    """Processes with fewer or shorter documents run the trunk as often as the others; what they get stays theirs."""
    trunk = tiny_trunk(family_name)
    tokens_BT = torch.arange(1, 13)[None]
    document_BT = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    expected_BTD = isolated_hidden(trunk, tokens_BT, document_BT)
    forwards: list[tuple[int, ...]] = []
    trunk.decoder.register_forward_hook(lambda _module, _inputs, output: forwards.append(output[0].shape[:2]))
    groups = group_by_length(segments(document_BT.numpy()), 12)
    two_more = [*groups, [], []]
    assert torch.equal(isolated_hidden(trunk, tokens_BT, document_BT, two_more), expected_BTD)
    assert len(forwards) == len(groups) + 2
    assert forwards[-2:] == [(1, 1)] * 2


def test_a_broken_connection_is_a_lost_process_and_nothing_else_is() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    for broken in (gloo, torch.distributed.DistNetworkError("gone")):
        with pytest.raises(LostProcessError, match="another process of this run is gone"), lost_process_is_named():
            raise broken
    other = RuntimeError("shape mismatch")
    with pytest.raises(RuntimeError) as caught, lost_process_is_named():
        raise other
    assert caught.value is other
