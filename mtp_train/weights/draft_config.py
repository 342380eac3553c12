"""The ``config.json`` of a draft model, as engines and the speculators package read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from mtp_train.families.drafts import SPECULATORS_ARCHITECTURE, WRITTEN_ARCHITECTURES
from mtp_train.families.spec import HeadKind, RawConfig
from mtp_train.weights.files import TORCH_DTYPES

_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
)
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What speculators keeps beside the config of the layer.
_NOT_OF_THE_LAYER = ("architectures", "draft_vocab_size", "target_hidden_size", "norm_before_residual", "dtype")


def draft_config(
    kind: HeadKind,
    layer_config: PretrainedConfig,
    num_modules: int,
    trunk: RawConfig,
    *,
    num_drafted: int | None,
    dtype: str,
) -> dict[str, Any]:
    """Return the config for engines.

    The layers whose states an EAGLE-3 head reads are not in it: engines agree on the default, and count those that a
    config names from different ends.

    Args:
        kind: Of the head.
        layer_config: Of its layers.
        num_modules: Blocks of a Medusa head.
        trunk: The trunk's raw text config.
        num_drafted: How many of the trunk's tokens are drafted; None for all.
        dtype: Of the head's tensors, as safetensors calls it.
    """
    vocab_size = layer_config.vocab_size
    common = {
        "architectures": list(WRITTEN_ARCHITECTURES[kind]),
        "vocab_size": vocab_size,
        "dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
    }
    if kind == "medusa":
        return {
            **common,
            "model_type": "medusa",
            "hidden_size": layer_config.hidden_size,
            "num_heads": num_modules,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "truncated_vocab_size": vocab_size,
        }
    layer = layer_config.to_dict()
    config = {
        **common,
        "model_type": "llama",
        **{field: layer[field] for field in _LAYER_FIELDS},
        **{field: trunk.get(field) for field in _TOKEN_FIELDS},
        **_older_rope(layer["rope_parameters"]),
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if kind == "eagle3":
        config["draft_vocab_size"] = num_drafted or vocab_size
        config["target_hidden_size"] = layer["hidden_size"]
        # False is not the default everywhere.
        config["norm_before_residual"] = bool(layer.get("norm_before_residual"))
    return config


def _older_rope(rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's settings as engines on transformers 4 read them."""
    scaled = rope_parameters.get("rope_type", "default") != "default"
    scaling = {name: value for name, value in rope_parameters.items() if name != "rope_theta"} if scaled else None
    return {"rope_theta": rope_parameters["rope_theta"], "rope_scaling": scaling}


def speculators_config(
    config: Mapping[str, Any], num_depths: int, verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """Return the config for speculators of an EAGLE-3 head.

    Args:
        config: The one for engines.
        num_depths: How deep to draft by default.
        verifier: Path or hub id of the trunk.
        architectures: The trunk's.
    """
    return {
        **{field: config[field] for field in _NOT_OF_THE_LAYER},
        "architectures": [SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_depths}],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "tie_word_embeddings": False,
        "transformer_layer_config": {field: value for field, value in config.items() if field not in _NOT_OF_THE_LAYER},
    }
