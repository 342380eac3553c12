"""Tiny random LoRA adapters on disk, made by peft itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints import save_tensors
from json_files import read_json, write_json


def write_adapter(checkpoint: Path, out: Path, auto: Any = AutoModelForCausalLM, **settings: Any) -> PeftModel:
    """Save a random adapter of a checkpoint's model, loaded by ``auto``; return the model that wears it, unmerged.

    It adapts the queries, unless the settings name other modules.
    """
    torch.manual_seed(5)
    ours = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "init_lora_weights": False}
    config = LoraConfig(**{**ours, **settings})
    with warnings.catch_warnings():
        # peft warns of what it saves for an embedding, and of tied weights.
        warnings.simplefilter("ignore")
        model = get_peft_model(auto.from_pretrained(checkpoint), config)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("lora_" not in name or "bias" in name or "magnitude" in name):
                parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(out)
    return model


def rewrite_config(adapter: Path, **fields: Any) -> None:
    """Change fields of an adapter's config."""
    file = adapter / "adapter_config.json"
    write_json(file, read_json(file) | fields)


def rename_keys(adapter: Path, old: str, new: str) -> None:
    """Rename an adapter's tensors."""
    file = adapter / "adapter_model.safetensors"
    save_tensors({key.replace(old, new): value for key, value in load_file(file).items()}, file)


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model with its adapter merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return state


def assert_like_peft(out: Path, model: Any) -> None:
    """What transformers loads from our checkpoint is what peft merges."""
    expected = merged_by_peft(model)
    found = type(model.get_base_model()).from_pretrained(out).state_dict()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
