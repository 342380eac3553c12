"""Tiny random trunks of the kind that external drafters are made for, and such drafters, built in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mtp_train.families import FAMILIES
from mtp_train.families.assistants import GEMMA4_ASSISTANT
from mtp_train.heads.trunk import Trunk
from tiny import SLIDING_WINDOW, VOCAB_SIZE, WEIGHT_STD

TRUNK_HIDDEN, ASSISTANT_HIDDEN = 32, 24
NUM_CENTROIDS = 8
ORDERED_VOCAB_SIZE = 64
"""Centroids share the vocabulary evenly."""
HAS_ASSISTANTS = "gemma4_assistant" in CONFIG_MAPPING

_TEXT = {
    "model_type": "gemma4_text",
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": SLIDING_WINDOW,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def text_config(hidden_size: int, layers: str, **fields: Any) -> Any:
    """Return a text config; ``layers`` has an ``s`` for each sliding layer and an ``f`` for each full one."""
    types = ["sliding_attention" if letter == "s" else "full_attention" for letter in layers]
    values = {**_TEXT, "hidden_size": hidden_size, "num_hidden_layers": len(layers), "layer_types": types, **fields}
    return CONFIG_MAPPING["gemma4_text"](**values)


def tiny_gemma_trunk(seed: int = 0, *, vocab_size: int = VOCAB_SIZE, num_shared: int = 2, **fields: Any) -> Trunk:
    """Return a trunk with both kinds of layers, the last ``num_shared`` of which have no keys of their own."""
    per_layer = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": vocab_size, "vocab_size": vocab_size}
    config = text_config(TRUNK_HIDDEN, "sfsfsf", num_kv_shared_layers=num_shared, **{**per_layer, **fields})
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    # Borrowed for what it says of the trunk: no recurrent layers.
    borrowed = next(family for family in FAMILIES if family.name == "glm4_moe")
    family = dataclasses.replace(borrowed, name="gemma4", masks_by_layer_type=True)
    return Trunk(model.requires_grad_(False).eval(), family)


def tiny_assistant(seed: int = 0, *, vocab_size: int = VOCAB_SIZE, ordered: bool = False, **fields: Any) -> Any:
    """Return transformers' model of an external drafter for such a trunk."""
    text = text_config(
        ASSISTANT_HIDDEN,
        "ssf",
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        vocab_size=vocab_size,
        **fields,
    )
    config = CONFIG_MAPPING["gemma4_assistant"](
        text_config=text,
        backbone_hidden_size=TRUNK_HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=NUM_CENTROIDS,
        centroid_intermediate_top_k=2,
    )
    with GEMMA4_ASSISTANT.building(text):
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed + 500)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size, generator=torch.Generator()))
    return model.requires_grad_(False).eval()


def randomise(model: nn.Module, seed: int) -> None:
    """Draw weights large enough that greedy decoding does not fall into a loop."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(WEIGHT_STD * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
