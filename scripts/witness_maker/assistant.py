"""Build and save an assistant: a small decoder without keys, which attends to those of a Gemma 4 trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from mtp_train.families import of_kind
from mtp_train.heads.assistant import AssistantHead, building_assistant
from mtp_train.trunk.load import Trunk
from witness_maker.words import word_tokenizer

LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


def random_assistant(trunk: Trunk) -> AssistantHead:
    """Return an assistant with transformers' initial values, and key heads like the trunk's."""
    fields = trunk.config.to_dict()
    # Its sizes of the two types of layers are in another form, by layer.
    del fields["per_layer_config"]
    last = {kind: trunk.config.per_layer_config[index] for index, kind in enumerate(trunk.config.layer_types)}
    text_config = CONFIG_MAPPING[trunk.config.model_type](
        **{
            **fields,
            # llama.cpp refuses an assistant with the hidden size of its trunk.
            "hidden_size": trunk.config.hidden_size // 2,
            "num_hidden_layers": len(LAYERS),
            "num_kv_shared_layers": len(LAYERS),
            "layer_types": LAYERS,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "final_logit_softcapping": None,
            "global_head_dim": last["full_attention"].head_dim,
            "num_global_key_value_heads": last["full_attention"].num_key_value_heads,
            "tie_word_embeddings": True,
        }
    )
    config = CONFIG_MAPPING["gemma4_assistant"](text_config=text_config, backbone_hidden_size=trunk.config.hidden_size)
    return AssistantHead(_built(config), of_kind(trunk.family, "assistant")).eval()


def save_assistant(head: AssistantHead, directory: Path) -> None:
    """Write an assistant in bf16, as transformers writes it."""
    model = _built(head.model.config)
    model.load_state_dict({**head.model.state_dict(), "lm_head.weight": head.output_VA})
    model.to(torch.bfloat16).save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)


def _built(config: PretrainedConfig) -> Any:
    with building_assistant(config.get_text_config()):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
