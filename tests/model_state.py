"""All that can be told of a model: what a promise to leave it alone is checked against."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig


def model_state(model: nn.Module) -> dict[str, object]:
    """Return every module's class, attributes, parameters, buffers and hooks, by the attribute's full name.

    Two models that were made alike have equal states.
    """
    found: dict[str, object] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name} class"] = type(module)
        found |= {f"{name}.{field}": _plain(value) for field, value in vars(module).items()}
    return found


def difference(first: Mapping[str, object], second: Mapping[str, object]) -> set[str]:
    """Return the names whose values differ, or that one of two states lacks."""
    absent = object()
    return {name for name in first.keys() | second.keys() if first.get(name, absent) != second.get(name, absent)}


def _plain(value: Any) -> object:
    """Return what is comparable between two objects that were made alike."""
    if isinstance(value, Tensor):
        content = hashlib.sha256(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return (type(value), value.dtype, tuple(value.shape), value.requires_grad, content)
    if isinstance(value, nn.Module):
        # Its own attributes stand under its own name.
        return type(value)
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, (PretrainedConfig, GenerationConfig)):
        return (type(value), _plain(vars(value)))
    if isinstance(value, partial):
        return _plain(value.func)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else type(value)
