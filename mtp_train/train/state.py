"""Resume state: what a killed run needs to go on to exactly the weights it would have reached.

One directory per saved step, written aside and renamed: whatever is there is whole, and the newest wins. Data order,
learning rate and random numbers are functions of the step, so weights, optimiser moments and the step are all there is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mtp_train.errors import TrainingError
from mtp_train.weights.files import SAFETENSORS_DTYPES, read_json
from mtp_train.weights.writing import PendingTensor, held_tensor, new_directory, write_json, write_safetensors

_WEIGHTS, _OPTIMIZER, _META = "head.safetensors", "optimizer.safetensors", "state.json"


def _step_directories(state_dir: Path) -> list[tuple[int, Path]]:
    found = [(int(path.name.removeprefix("step-")), path) for path in state_dir.glob("step-*")]
    return sorted(found)


def latest_step(state_dir: Path) -> int:
    """Return the newest saved step, 0 where there is none."""
    found = _step_directories(state_dir)
    return found[-1][0] if found else 0


def save_state(state_dir: Path, step: int, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save the state after ``step`` optimiser steps, then remove older ones."""
    moments, numbers = _flatten_optimizer(head, optimizer)
    with new_directory(state_dir / f"step-{step:08d}", what="the resume state") as directory:
        write_safetensors(directory / _WEIGHTS, _pending(head.state_dict()))
        write_safetensors(directory / _OPTIMIZER, _pending(moments))
        write_json(directory / _META, {"step": step, "optimizer": numbers})
    for old_step, path in _step_directories(state_dir):
        if old_step < step:
            shutil.rmtree(path)


def load_state(state_dir: Path, head: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest state into head and optimiser and return its step, 0 where there is none.

    Raises:
        TrainingError: The state is of another head.
    """
    step = latest_step(state_dir)
    if step == 0:
        return 0
    path = state_dir / f"step-{step:08d}"
    weights = load_file(path / _WEIGHTS)
    if weights.keys() != head.state_dict().keys():
        raise TrainingError(
            f"{path}: holds the state of another head; expected this recipe's. Use another run_dir or remove this one."
        )
    head.load_state_dict(weights)
    moments, numbers = load_file(path / _OPTIMIZER), read_json(path / _META)["optimizer"]
    for name, parameter in _trained(head):
        if name not in numbers:
            continue
        entry: dict[str, Any] = {}
        for field in ("exp_avg", "exp_avg_sq"):
            entry[field] = moments[f"{name}.{field}"].to(parameter.device)
        entry["step"] = torch.tensor(float(numbers[name]))
        optimizer.state[parameter] = entry
    return step


def _trained(head: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]


def _flatten_optimizer(head: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Name AdamW's moments by parameter. The step count of a parameter is the optimiser's own (bias correction)."""
    moments: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for name, parameter in _trained(head):
        entry = optimizer.state.get(parameter)
        # A parameter that no loss has reached has no moments yet.
        if not entry:
            continue
        moments |= {f"{name}.{field}": entry[field] for field in ("exp_avg", "exp_avg_sq")}
        numbers[name] = float(entry["step"])
    return moments, numbers


def _pending(tensors: dict[str, Tensor]) -> list[PendingTensor]:
    return [held_tensor(key, SAFETENSORS_DTYPES[value.dtype], value) for key, value in tensors.items()]
