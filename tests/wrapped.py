"""Tiny vision-language models around tiny trunks that get a head attached, saved as their releases have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tiny import VOCAB_SIZE, tiny_trunk
from tiny_configs import tiny_config

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# Model type to its vision tower, and what it says of the two together.
_TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("siglip_vision_model", {}, {"mm_tokens_per_image": 4}),
    "mistral3": ("pixtral", {}, {}),
    "llava": ("clip_vision_model", {}, {}),
    "llava_next": ("clip_vision_model", {}, {}),
    "aya_vision": ("siglip_vision_model", {}, {}),
    "internvl": ("internvl_vision", {"image_size": [8, 8], "patch_size": [4, 4]}, {}),
}


def save_wrapped(
    path: Path,
    wrapper: str,
    family_name: str,
    *,
    tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int | None = None,
) -> Path:
    """Save a vision-language model around a family's tiny trunk."""
    tower, of_vision, of_both = _TOWERS[wrapper]
    config = CONFIG_MAPPING[wrapper](
        text_config=tiny_config(family_name, tied, vocab_size, num_layers).to_dict(),
        vision_config={"model_type": tower, **_VISION, **of_vision},
        tie_word_embeddings=tied,
        **of_both,
    )
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        trunk = tiny_trunk(family_name, tied=tied, vocab_size=vocab_size, num_layers=num_layers)
        model.model.language_model.load_state_dict(trunk.decoder.state_dict())
        model.lm_head.weight.copy_(trunk.lm_head_VD)
    model.save_pretrained(path)
    return path
