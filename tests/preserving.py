"""A user's fine-tuning script in small: transformers' own trainer on random tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from tiny import random_tokens

LEARNING_RATE = 1e-3


def random_rows(num_rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """Return rows as a causal language model's trainer takes them."""
    tokens_BT = random_tokens(12, num_rows)
    return [{"input_ids": tokens_T, "labels": tokens_T} for tokens_T in tokens_BT]


def load(path: Path) -> PreTrainedModel:
    """Load a model as a user does."""
    return AutoModelForCausalLM.from_pretrained(path)


def trainer_arguments(out: Path, **settings: Any) -> dict[str, Any]:
    """Return arguments of a training of two steps that saves a checkpoint at each."""
    return {
        "output_dir": str(out),
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": LEARNING_RATE,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **settings,
    }


def make_trainer(model: Any, out: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a trainer of a model, or of what ``model_init`` in the settings makes."""
    model_init = settings.pop("model_init", None)
    return Trainer(
        model=model,
        model_init=model_init,
        args=TrainingArguments(**trainer_arguments(out, **settings)),
        train_dataset=random_rows(),  # type: ignore[arg-type]
        eval_dataset=random_rows(2),  # type: ignore[arg-type]
        callbacks=list(callbacks),
    )


def told(caplog: pytest.LogCaptureFixture, hook: str) -> list[str]:
    """Return what a module of our hooks has logged."""
    return [record.getMessage() for record in caplog.records if record.name == f"mtp_train.hooks.{hook}"]
