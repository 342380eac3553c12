"""A fine-tune as a recipe, on tiny random checkpoints: what it takes to run one in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints import all_tensors
from mtp_train.heads.diagnose import layout_of
from mtp_train.recipe import Recipe
from mtp_train.weights.files import open_checkpoint
from runs import tiny_recipe

STEPS, SAVE_STEPS = 4, 2
LORA = {"r": 4, "targets": ["q_proj", "o_proj"]}


def tuning(directory: Path, run_dir: Path, *, way: str = "beside", lora: Any = None, **overrides: Any) -> Recipe:
    """Return a recipe that fine-tunes the base of ``write_inputs`` in a few seconds."""
    arms = ["none", "graft", *(["retrained"] if way == "beside" else [])]
    sft = {"head": way, "lora": lora, **({"head_lr": 1e-2} if way == "beside" else {})}
    settings: dict[str, Any] = {
        "model": {"trunk": str(directory / "base")},
        "head": {"init": "native", "num_depths": 2},
        "sft": sft,
        "data__pack": False,
        "train__max_steps": STEPS,
        "train__save_steps": SAVE_STEPS,
        "train__lr": 1e-3,
        "evaluate": {"arms": arms, "prompts": 2, "max_new_tokens": 6},
    }
    return tiny_recipe(directory, run_dir, **(settings | overrides))


def split(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's trunk and head, what the head repeats of the trunk left out."""
    layout = layout_of(open_checkpoint(path))
    tensors = {key: value for key, value in all_tensors(path).items() if layout.shared_key(key) is None}
    head = {key: value for key, value in tensors.items() if layout.is_head_key(key)}
    return {key: value for key, value in tensors.items() if key not in head}, head


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())
