"""Save and load resume states, from which a killed run reaches exactly the weights of an unbroken run.

Each saved step has a directory, written under another name and renamed: a directory is always complete, and the newest
one is used. Data order, learning rate and random numbers are functions of the step, so a state holds weights, optimiser
moments and the step. It also holds the sums since the last log line, so that the log equals an unbroken run's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from mtp_train.errors import TrainingError
from mtp_train.heads.lora import is_lora
from mtp_train.train.moments import FIELDS, Moments, moments_of
from mtp_train.train.shard import whole_state
from mtp_train.weights.files import SAFETENSORS_DTYPES, read_json
from mtp_train.weights.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors

_WEIGHTS, _OPTIMIZER, _META = "head.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Best:
    """The best measured head (:mod:`mtp_train.train.select`) that a state records."""

    step: int = 0
    """Steps done at its measure; 0 before the first measure."""
    score: float = 0.0
    since: int = 0
    """Number of measures after it."""


def _step_directories(state_dir: Path) -> list[tuple[int, Path]]:
    found = [(int(path.name.removeprefix("step-")), path) for path in state_dir.glob("step-*")]
    return sorted(found)


def latest_step(state_dir: Path) -> int:
    """Return the newest saved step; 0 if there is none."""
    found = _step_directories(state_dir)
    return found[-1][0] if found else 0


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
    window: Mapping[str, Any] | None = None,
    *,
    writes: bool = True,
) -> None:
    """Save the state after ``step`` optimiser steps, then remove older states.

    Every process must call it, to contribute its shards; one process writes. The state does not depend on the number of
    processes.

    Args:
        state_dir: Directory of resume states.
        step: Steps done.
        head: The head, sharded or whole.
        optimizer: AdamW, prepared by accelerate or not.
        best: The best head so far, None without a selection. Earlier best heads are removed.
        window: The sums since the last log line.
        writes: Whether this process writes.
    """
    weights = head_state(head)
    moments, numbers = _flatten_optimizer(head, optimizer)
    if not writes:
        return
    with new_directory(_step_directory(state_dir, step), what="the resume state") as directory:
        write_safetensors(directory / _WEIGHTS, _pending(weights))
        write_safetensors(directory / _OPTIMIZER, _pending(moments))
        meta = {"step": step, "optimizer": numbers, "best": asdict(best or Best()), "window": window}
        write_json(directory / _META, meta)
    for path in state_dir.glob("best-*"):
        # Only after the state is saved: a state from before the measure needs the earlier best head.
        if best is not None and path != _best_directory(state_dir, best.step):
            shutil.rmtree(path)
    for old_step, path in _step_directories(state_dir):
        if old_step < step:
            shutil.rmtree(path)


def load_weights(state_dir: Path, head: nn.Module) -> int:
    """Load the newest state's weights into a head that is not wrapped yet.

    Returns:
        The step of the state; 0 if there is none.

    Raises:
        TrainingError: The state belongs to another head.
    """
    step = latest_step(state_dir)
    if step == 0:
        return 0
    path = _step_directory(state_dir, step)
    weights = load_file(path / _WEIGHTS)
    if weights.keys() != head_state(head).keys():
        raise TrainingError(
            f"{path}: holds the state of another head; expected this recipe's. Use another run_dir or remove this one."
        )
    # With LoRA the state holds the trained matrices alone.
    head.load_state_dict(weights, strict=False)
    return step


def load_moments(state_dir: Path, step: int, head: nn.Module, optimizer: Any) -> None:
    """Load a step's moments into an optimiser, after accelerate has prepared it."""
    path = _step_directory(state_dir, step)
    values, numbers = load_file(path / _OPTIMIZER), read_json(path / _META)["optimizer"]
    into = moments_of(optimizer)
    for name, parameter in _trained(head):
        if name in numbers:
            fields = {field: values[f"{name}.{field}"] for field in FIELDS}
            into.put(parameter, Moments(float(numbers[name]), fields))


def load_best(state_dir: Path) -> Best:
    """Return the best head that the newest state records."""
    step = latest_step(state_dir)
    return Best(**read_json(_step_directory(state_dir, step) / _META)["best"]) if step else Best()


def load_window(state_dir: Path) -> dict[str, Any] | None:
    """Load the newest state's sums since the last log line; None if it has none."""
    step = latest_step(state_dir)
    return read_json(_step_directory(state_dir, step) / _META).get("window") if step else None


def save_best(state_dir: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Save the weights of the best measure, taken after ``step`` steps."""
    path = _best_directory(state_dir, step)
    if path.exists():
        # Left by a run that was killed before its next state: the weights are the same.
        shutil.rmtree(path)
    with new_directory(path, what="the best head") as directory:
        write_safetensors(directory / _WEIGHTS, _pending(weights))


def best_weights(state_dir: Path, best: Best) -> dict[str, Tensor]:
    """Load the weights of the best measure."""
    return load_file(_best_directory(state_dir, best.step) / _WEIGHTS)


def _best_directory(state_dir: Path, step: int) -> Path:
    return state_dir / f"best-{step:08d}"


def _step_directory(state_dir: Path, step: int) -> Path:
    return state_dir / f"step-{step:08d}"


def _trained(head: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]


def _flatten_optimizer(head: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return AdamW's moments by parameter name, and each parameter's own step count (for the bias correction)."""
    values: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    source = moments_of(optimizer)
    for name, parameter in _trained(head):
        moments = source.get(parameter)
        # A parameter has no moments before its first gradient.
        if moments is not None:
            values |= {f"{name}.{field}": value for field, value in moments.values.items()}
            numbers[name] = moments.step
    return values, numbers


def _pending(tensors: dict[str, Tensor]) -> list[PendingTensor]:
    return [held_tensor(key, SAFETENSORS_DTYPES[value.dtype], value) for key, value in tensors.items()]
