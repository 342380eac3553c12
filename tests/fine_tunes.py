"""A fine-tune as a recipe, on tiny random checkpoints: what it takes to run one in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtp_train.recipe.schema import Recipe
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
