"""Tiny random trunks of the kind that external drafters are made for, and such drafters, built in memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mtp_train.families.assistants import GEMMA4_ASSISTANT, building_assistant
from mtp_train.heads.assistant import AssistantHead
from mtp_train.trunk.load import Trunk
from tiny import SLIDING_WINDOW, VOCAB_SIZE, WEIGHT_STD

TRUNK_HIDDEN, ASSISTANT_HIDDEN = 32, 24
NUM_CENTROIDS, CHOSEN_CENTROIDS = 8, 2
ORDERED_VOCAB_SIZE = 64
"""Centroids share the vocabulary evenly."""
VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6},
    "values_are_keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}
"""What trunks of the several sizes have. Only the last layers of the first have no keys of their own."""
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
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": len(layers), "layer_types": types}
    values = {**_TEXT, **sizes, **fields}
    return CONFIG_MAPPING[values.pop("model_type")](**values)


def tiny_gemma_trunk(variant: str = "shared", *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Trunk:
    """Return a trunk with both kinds of layers."""
    fields = {"hidden_size_per_layer_input": 0, "vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size}
    config = text_config(TRUNK_HIDDEN, "sfsfsf", final_logit_softcapping=30.0, **{**fields, **VARIANTS[variant]})
    # Tied, so small a model repeats what it reads for ever.
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    return Trunk(model.requires_grad_(False).eval(), GEMMA4_ASSISTANT.trunk)


def tiny_assistant(
    variant: str = "shared", *, vocab_size: int = VOCAB_SIZE, ordered: bool = False, kind: str = "gemma4", seed: int = 0
) -> Any:
    """Return transformers' model of an external drafter for such a trunk."""
    per_layer = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    own_values = {name: value for name, value in VARIANTS[variant].items() if variant == "values_are_keys"}
    fields = {**per_layer, "model_type": f"{kind}_text", "vocab_size": vocab_size, **own_values}
    text = text_config(ASSISTANT_HIDDEN, "ssf", num_kv_shared_layers=3, **fields)
    config = CONFIG_MAPPING[f"{kind}_assistant"](
        text_config=text,
        backbone_hidden_size=TRUNK_HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=NUM_CENTROIDS,
        centroid_intermediate_top_k=CHOSEN_CENTROIDS,
    )
    with building_assistant(text):
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed + 500)
    if ordered:
        shuffled = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(shuffled)
    return model.requires_grad_(False).eval()


def assistant_head(model: Any) -> AssistantHead:
    """Return a copy of a tiny assistant as a head, in eval mode."""
    return AssistantHead(copy.deepcopy(model), GEMMA4_ASSISTANT).eval()


def randomise(model: nn.Module, seed: int) -> None:
    """Draw weights large enough that greedy decoding does not fall into a loop."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(WEIGHT_STD * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
