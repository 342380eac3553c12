"""Build the accelerator, check it against the launcher's settings, and prepare module and optimiser.

With several wrong set-ups accelerate continues silently: the processes are not connected, or the requested sharding is
missing. Each of these is an error here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, parse_flag_from_env
from torch import Tensor, nn

from mtp_train.errors import CheckpointError, LostProcessError, MtpError, TrainingError
from mtp_train.train.head_training import HeadTraining
from mtp_train.train.plan import Plan
from mtp_train.train.shard import shard_head, shard_layers, shards_trunk, whole
from mtp_train.train.state import allocate_zero_moments
from mtp_train.trunk.precision import COMPUTE_DTYPES
from mtp_train.upstream.transformers_private import forget_deepspeed

_STALLED = timedelta(minutes=30)
"""A collective of training that takes longer fails: a process hangs."""
_PATIENCE = timedelta(hours=24)
"""A process waits so long between two stages: for the slowest one's answers, or while the first hashes the inputs."""

Item = TypeVar("Item")


class RunAccelerator(Accelerator):
    """accelerate's accelerator, whose processes wait for one another between stages for as long as a stage may take.

    These waits have a gloo group of their own, so that the collectives of training keep a short time limit.
    """

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(
            mixed_precision="no", kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=_STALLED)]
        )
        self._waiting: torch.distributed.ProcessGroup | None = None
        if self.num_processes > 1:
            self._waiting = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def wait_for_everyone(self) -> None:
        if self._waiting is not None:
            torch.distributed.barrier(self._waiting)

    def gather_items(self, own: Sequence[Item]) -> list[Item]:
        """Return the items of all processes, in the order of the processes; every process must call it."""
        if self._waiting is None:
            return list(own)
        found: list[Sequence[Item]] = [()] * self.num_processes
        torch.distributed.all_gather_object(found, own, group=self._waiting)
        return [item for items in found for item in items]

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """End all processes with the same error if one of them raises an MtpError in this block.

        Every process must enter the block, and no collective may be inside it.

        Raises:
            MtpError: The block of a process raised it.
        """
        own: MtpError | None = None
        try:
            yield
        except MtpError as error:
            own = error
        found = self.gather_items([None if own is None else str(own)])
        if own is not None and len(set(found)) == 1:
            raise own
        failed = next((rank for rank, said in enumerate(found) if said is not None), None)
        if failed is not None:
            raise CheckpointError(f"process {failed}: {found[failed]}") from own

    def made_by_main(self, make: Callable[[], Item]) -> Item:
        """Return what a function makes in the main process, or raise its MtpError; every process must call it."""
        with self.failing_together():
            made = make() if self.is_main_process else None
        return self.said_by_main(made)

    def said_by_main(self, message: Any = None) -> Any:
        """Return the main process's message; every process must call it, the others without a message."""
        return self.gather_items([message])[0]


def make_accelerator() -> RunAccelerator:
    """Build the accelerator that the launcher's settings ask for.

    It sets no precision: :class:`HeadTraining` casts by itself, alike under every wrapper. The mixed precision of FSDP2
    and DeepSpeed would round the inputs of the loss and the head's weights.

    Raises:
        TrainingError: accelerate's state differs from the launcher's settings.
    """
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and importlib.util.find_spec("deepspeed") is None:
        raise TrainingError(
            'launcher: asks for DeepSpeed, which is not installed; expected it. Run pip install "mtp-train[deepspeed]".'
        )
    # accelerate sets no backend for DeepSpeed on a machine without an accelerator.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and not torch.accelerator.is_available()
    accelerator = RunAccelerator(backend="gloo" if on_cpu else None)
    require_as_asked(accelerator)
    if accelerator.distributed_type is DistributedType.FSDP:
        from accelerate.utils import disable_fsdp_ram_efficient_loading

        # Otherwise transformers loads real weights in the first process only; the others would decode with random ones.
        disable_fsdp_ram_efficient_loading()
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # Otherwise transformers loads every trunk in ZeRO-3 partitions, also for decoding.
        forget_deepspeed()
    return accelerator


def require_as_asked(accelerator: Accelerator) -> None:
    """Raise a TrainingError where accelerate lacks processes or shards that the launcher's settings ask for."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise TrainingError(
            f"launcher: started {launched} processes, of which accelerate joins {accelerator.num_processes}; expected "
            "one group. On CPUs set ACCELERATE_USE_CPU=true and use cpu_ddp.yaml (mtp-train recipes shows its path)."
        )
    found = accelerator.distributed_type
    for variable, asked in (
        ("ACCELERATE_USE_FSDP", DistributedType.FSDP),
        ("ACCELERATE_USE_DEEPSPEED", DistributedType.DEEPSPEED),
    ):
        if parse_flag_from_env(variable) and found is not asked:
            raise TrainingError(
                f"launcher: asks for {asked.value}, accelerate gives {found.value}; expected what was asked for. "
                "accelerate shards on GPUs only: on CPUs use cpu_ddp.yaml (mtp-train recipes shows its path)."
            )
    if found is DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise TrainingError(
            "launcher: asks for FSDP 1; expected FSDP 2. Set fsdp_version: 2, as fsdp2.yaml of mtp-train recipes does."
        )
    if found is DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage not in (2, 3):
        raise TrainingError(
            f"launcher: asks for ZeRO stage {accelerator.state.deepspeed_plugin.zero_stage}; expected 2 or 3. Use "
            "zero2.yaml or zero3.yaml (mtp-train recipes shows their paths)."
        )


def require_processes(expected: int | None, accelerator: Accelerator) -> None:
    """Raise a TrainingError for another number than ``train.processes``: without a GPU, accelerate drops processes."""
    if expected not in (None, accelerator.num_processes):
        raise TrainingError(
            f"train.processes: {expected}, and the launcher started {accelerator.num_processes}; expected as many. Add "
            f"--num_processes {expected} to accelerate launch (on CPUs with cpu_ddp.yaml)."
        )


def describe_processes(accelerator: Accelerator) -> str:
    """Return the number of processes and the kind of shards, for a reader."""
    kind = _kind(accelerator)
    shards = f"{kind} shards" if kind.startswith(("FSDP", "DEEPSPEED")) else "no shards"
    count = accelerator.num_processes
    return f"{count} process{'es' * (count > 1)} on {accelerator.device.type}, {shards}"


@contextlib.contextmanager
def lost_process_is_named() -> Iterator[None]:
    """Turn gloo's socket errors into a LostProcessError. With NCCL the launcher ends the processes instead."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise LostProcessError(
            "launcher: another process of this run is gone (killed, or by the error above); expected all to the end. "
            "Start the same command again: it resumes from the last saved state."
        ) from error


def prepare(
    module: HeadTraining, optimizer: torch.optim.Optimizer, accelerator: Accelerator, plan: Plan, max_grad_norm: float
) -> tuple[nn.Module, Any]:
    """Wrap module and optimiser for the launcher's set-up; a sharded trunk is sharded layer by layer first.

    Raises:
        TrainingError: Several processes, and no wrapper that joins them.
    """
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _configure_deepspeed(module, accelerator, plan, max_grad_norm)
    if shards_trunk(accelerator):
        shard_layers(module, accelerator)
    else:
        module.to(accelerator.device)
    groups = [group["params"] for group in optimizer.param_groups]
    if accelerator.distributed_type is DistributedType.FSDP:
        shards = shard_head(module)
        groups = [[shards[whole] for whole in params] for params in groups]
        # accelerate finds sharded parameters again by the address of their data, which an empty shard lacks.
        for group in optimizer.param_groups:
            group["params"] = []
    wrapped, prepared = accelerator.prepare(module, optimizer)
    if accelerator.distributed_type is DistributedType.FSDP:
        for group, params in zip(prepared.param_groups, groups, strict=True):
            group["params"] = params
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        allocate_zero_moments(prepared.optimizer)
    if accelerator.num_processes > 1 and type(wrapped) is HeadTraining:
        raise TrainingError(
            f"launcher: {accelerator.num_processes} processes ({accelerator.distributed_type.value}), and accelerate "
            "wrapped nothing: each would train alone. Use an accelerate file that mtp-train recipes lists."
        )
    return wrapped, prepared


def _configure_deepspeed(module: HeadTraining, accelerator: Accelerator, plan: Plan, max_grad_norm: float) -> None:
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings |= {
        "train_micro_batch_size_per_gpu": plan.micro_batch_sequences,
        "train_batch_size": plan.sequences_per_step,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": max_grad_norm,
    }
    # DeepSpeed allocates buckets of this many elements for any model; a head often has fewer.
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    settings["zero_optimization"].setdefault("reduce_bucket_size", min(trained, 200_000_000))
    # By default DeepSpeed treats the experts of some mixtures as one unit, also in the head, and fails at depth 2.
    settings["zero_optimization"].setdefault("leaf_module", {"classes": []})


def clip_gradient(accelerator: Accelerator, wrapped: nn.Module, max_grad_norm: float) -> Tensor | float:
    """Clip the gradient to a norm and return the norm before, a scalar on the device if the host need not know it."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        # It has clipped in its backward pass.
        engine: Any = wrapped
        return engine.get_global_grad_norm()
    return whole(accelerator.clip_grad_norm_(wrapped.parameters(), max_grad_norm))


def takes_fused(accelerator: Accelerator) -> bool:
    """Return whether AdamW takes a step in fused kernels: on CUDA and ROCm, but not in DeepSpeed's own flat tensors."""
    return accelerator.device.type == "cuda" and accelerator.distributed_type is not DistributedType.DEEPSPEED


def run_facts(accelerator: Accelerator, wrapped: nn.Module, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Return the processes, the wrapper and the precision that training really uses, for ``metrics.jsonl``."""
    return {
        "world_size": accelerator.num_processes,
        "distributed_type": _kind(accelerator),
        "wrapper": type(wrapped).__name__,
        "precision": next(name for name, dtype in COMPUTE_DTYPES.items() if dtype is compute_dtype),
        "device": str(accelerator.device),
    }


def _kind(accelerator: Accelerator) -> str:
    kind = str(accelerator.distributed_type.value)
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        kind += f" ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return kind
