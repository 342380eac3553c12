"""Tiny random DFlash drafters: as transformers builds them, and as their releases are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

from checkpoints import save_tensors
from json_files import write_json
from tiny import VOCAB_SIZE, WEIGHT_STD

MODEL_TYPE = "muse_glimmer_assistant"
HAS_BLOCK_DRAFTERS = MODEL_TYPE in CONFIG_MAPPING
MASK, READ = 5, (0, 2)
"""The mask token, and the layers whose output the drafter reads, as its authors count."""
LAYER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def reference(block_size: int, layers: Sequence[int] = READ, mask: int = MASK) -> Any:
    """Return transformers' drafter."""
    fields = {"block_size": block_size, "mask_token_id": mask, "target_layer_ids": list(layers)}
    config = CONFIG_MAPPING[MODEL_TYPE](**LAYER, layer_types=["full_attention"] * 2, **fields)
    model = AutoModel.from_config(config).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else WEIGHT_STD * noise)
    return model


def write_drafter(directory: Path, block_size: int, more: Mapping[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write a drafter as its authors do; ``more`` are further tensors, ``changes`` fields of config.json."""
    dflash = {"mask_token_id": MASK, "target_layer_ids": list(READ)}
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": VOCAB_SIZE, **LAYER}
    directory.mkdir()
    write_json(directory / "config.json", {**config, "dflash_config": dflash, "block_size": block_size, **changes})
    renames = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    tensors = {renames.get(name, name): value for name, value in reference(block_size).state_dict().items()}
    save_tensors({**tensors, **(more or {})}, directory / "model.safetensors")
    return directory


def speculators(**changes: Any) -> dict[str, Any]:
    """Return the fields that the speculators package writes in place of the authors'."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [one + 1 for one in READ],
        "mask_token_id": MASK,
        "dflash_config": None,
        "transformer_layer_config": {"model_type": "qwen3", "vocab_size": VOCAB_SIZE, **LAYER},
        **changes,
    }
