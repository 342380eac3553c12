"""Save and load resume states, from which a killed run reaches exactly the weights of an unbroken run.

Each saved step has a directory, written under another name and renamed. The two newest are kept, with checksums: a run
resumes from the newest one that is whole. Data order, learning rate and random numbers are functions of the step, so a
state holds weights, optimiser moments and the step. It also holds the sums since the last log line, so that the log
equals an unbroken run's, and the best head so far, unless that is the state's own.

AdamW's moments are stored as whole tensors. torch has them by parameter, in shards under FSDP2, and gathers them
(``torch.distributed.checkpoint.state_dict``). DeepSpeed flattens the parameters of a group, partitions the result over
the processes, and maps partitions to parameters.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mtp_train.checkpoints.files import read_json
from mtp_train.checkpoints.identity import hash_file
from mtp_train.checkpoints.writing import held_tensors, new_directory, write_json, write_safetensors
from mtp_train.errors import CheckpointError, TrainingError
from mtp_train.heads.lora import is_lora
from mtp_train.train.shard import whole_state
from mtp_train.upstream.deepspeed_private import flat_groups, is_zero_3, link_moments, partition_of

_WEIGHTS = "head.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_META = "state.json"
_BEST = "best.safetensors"
_CHECKSUMS = "sha256.json"
_KEPT_STATES = 2
FIELDS = ("exp_avg", "exp_avg_sq")
# Not strict: a parameter has no moments before its first gradient.
_WHOLE = StateDictOptions(full_state_dict=True, strict=False)


@dataclass(frozen=True)
class Best:
    """The best measured head (:mod:`mtp_train.train.select`) that a state records."""

    step: int = 0
    score: float = 0.0
    since: int = 0
    """Number of measures after it."""
    start: float = 0.0
    """The score of the head before the first step."""


def _step_directories(state_dir: Path) -> list[tuple[int, Path]]:
    """Return the directories of saved steps, oldest first; other entries are not ours."""
    found = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in state_dir.glob("step-*") if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_whole_step(state_dir: Path) -> tuple[int, dict[Path, str]]:
    """Return the newest step whose state is whole, and the states that are broken, with what is wrong with each.

    Returns:
        The step is 0 if there is no state at all.

    Raises:
        TrainingError: There are states, and none is whole.
    """
    saved = _step_directories(state_dir)
    broken = {path: why for _, path in saved if (why := _why_broken(path)) is not None}
    whole = [step for step, path in saved if path not in broken]
    if broken and not whole:
        raise TrainingError(
            f"{state_dir}: no resume state is whole ({'; '.join(broken.values())}); expected one. Restore one from a "
            "copy, or remove the directory to train from the start."
        )
    return max(whole, default=0), broken


def _why_broken(path: Path) -> str | None:
    """Return what is wrong with a state; None if it is whole."""
    try:
        checksums = read_json(path / _CHECKSUMS)
    except CheckpointError as error:
        return str(error)
    for name in {_WEIGHTS, _OPTIMIZER, _META} | checksums.keys():
        file = path / name
        if not file.is_file():
            return f"{file}: missing"
        if hash_file(file).sha256 != checksums.get(name):
            return f"{file}: damaged since it was written"
    return None


def head_state(head: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights as whole tensors: the head's, or with LoRA the trained matrices."""
    state = whole_state(head)
    trained = {name for name, _ in _trained(head)}
    return {name: state[name] for name in trained} if any(map(is_lora, trained)) else state


def save_state(
    state_dir: Path,
    step: int,
    head: nn.Module,
    optimizer: Any,
    best: Best | None = None,
    sums: Mapping[str, Any] | None = None,
    *,
    writes: bool = True,
) -> None:
    """Save the state after ``step`` optimiser steps; keep the one before, and remove older ones.

    Every process must call it, to contribute its shards; one process writes. The state does not depend on the number of
    processes.

    Args:
        best: The best head so far: the one of this step, or the best one of the state before. None without a selection.
    """
    weights = head_state(head)
    moments, numbers = _flatten_optimizer(head, optimizer) if step else ({}, {})
    if not writes:
        return
    target = _step_directory(state_dir, step)
    if target.exists():
        # The start of a run that was killed before its next state.
        shutil.rmtree(target)
    with new_directory(target, what="the resume state") as directory:
        write_safetensors(directory / _WEIGHTS, held_tensors(weights))
        write_safetensors(directory / _OPTIMIZER, held_tensors(moments))
        write_json(directory / _META, {"optimizer": numbers, "best": asdict(best or Best()), "sums": sums})
        files = [_WEIGHTS, _OPTIMIZER, _META]
        if best is not None and best.step != step:
            shutil.copyfile(_best_file(state_dir), directory / _BEST)
            files.append(_BEST)
        write_json(directory / _CHECKSUMS, {name: hash_file(directory / name).sha256 for name in files})
    for _, path in _step_directories(state_dir)[:-_KEPT_STATES]:
        shutil.rmtree(path)


def load_weights(state_dir: Path, step: int, head: nn.Module) -> None:
    """Load a step's weights into a head that is not wrapped yet.

    Raises:
        TrainingError: The state belongs to another head.
    """
    path = _step_directory(state_dir, step)
    weights = load_file(path / _WEIGHTS)
    if weights.keys() != head_state(head).keys():
        raise TrainingError(
            f"{path}: holds the state of another head; expected this recipe's. Use another run_dir or remove this one."
        )
    # With LoRA the state holds the trained matrices alone.
    head.load_state_dict(weights, strict=False)


def load_moments(state_dir: Path, step: int, head: nn.Module, optimizer: Any) -> None:
    """Load a step's moments into an optimiser, after accelerate has prepared it."""
    values = load_file(_step_directory(state_dir, step) / _OPTIMIZER)
    moments: dict[str, Any] = {
        name: {"step": torch.tensor(float(number)), **{field: values[f"{name}.{field}"] for field in FIELDS}}
        for name, number in _meta(state_dir, step)["optimizer"].items()
    }
    inner = _inner(optimizer)
    if isinstance(inner, torch.optim.Optimizer):
        groups = get_optimizer_state_dict(head, inner)["param_groups"]
        set_optimizer_state_dict(head, inner, {"state": moments, "param_groups": groups}, options=_WHOLE)
    else:
        _set_zero_moments(inner, dict(_trained(head)), moments)


def load_best(state_dir: Path, step: int) -> Best:
    return Best(**_meta(state_dir, step)["best"])


def load_sums(state_dir: Path, step: int) -> dict[str, Any]:
    return _meta(state_dir, step)["sums"]


def _meta(state_dir: Path, step: int) -> dict[str, Any]:
    return read_json(_step_directory(state_dir, step) / _META)


def best_weights(state_dir: Path) -> dict[str, Tensor]:
    """Return the weights of the best head, as the newest state has them."""
    return load_file(_best_file(state_dir))


def _best_file(state_dir: Path) -> Path:
    newest = _step_directories(state_dir)[-1][1]
    return newest / (_BEST if (newest / _BEST).is_file() else _WEIGHTS)


def _step_directory(state_dir: Path, step: int) -> Path:
    return state_dir / f"step-{step:08d}"


def _trained(head: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]


def _flatten_optimizer(head: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return AdamW's moments by parameter name, and each parameter's own step count (for the bias correction)."""
    inner = _inner(optimizer)
    found: Any
    if isinstance(inner, torch.optim.Optimizer):
        found = get_optimizer_state_dict(head, inner, options=_WHOLE)["state"]
    else:
        found = _zero_moments(inner, _trained(head))
    values = {f"{name}.{field}": entry[field] for name, entry in found.items() for field in FIELDS}
    return values, {name: float(entry["step"]) for name, entry in found.items()}


def _zero_moments(zero: Any, trained: Iterable[tuple[str, nn.Parameter]]) -> dict[str, dict[str, Any]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    step = next(iter(zero.optimizer.state.values()))["step"]
    return {
        name: {"step": step, **{field: safe_get_full_optimizer_state(parameter, field) for field in FIELDS}}
        for name, parameter in trained
    }


def _set_zero_moments(
    zero: Any, trained: Mapping[str, nn.Parameter], moments: Mapping[str, Mapping[str, Tensor]]
) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    for name, values in moments.items():
        for entry in zero.optimizer.state.values():
            entry["step"] = values["step"].clone()
        partition = partition_of(trained[name])
        for field in FIELDS:
            if partition is None:
                safe_set_full_optimizer_state(trained[name], values[field], field)
            else:
                # DeepSpeed's own partitioning of a whole value leaves out the padding of the last partition.
                safe_set_local_optimizer_state(trained[name], _own_part(values[field], partition.numel()), field)


def allocate_zero_moments(zero: Any) -> None:
    """Allocate all moments of a DeepSpeed optimiser, as it does at its first step.

    By default ZeRO-2 links parameters to their moments after the first step of its first group, and then finds no
    moments for the parameters of the other groups.
    """
    for flat in flat_groups(zero):
        zero.optimizer.state[flat] = {
            "step": torch.tensor(0.0),
            **{field: torch.zeros_like(flat) for field in FIELDS},
        }
    if not is_zero_3(zero):
        link_moments(zero)


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _own_part(value: Tensor, size: int) -> Tensor:
    """Return this process's partition of a flattened value; partitions have equal size, the last one is padded."""
    padded = value.new_zeros(size * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    return padded[size * torch.distributed.get_rank() :][:size]
