"""Key rules and layer configs of the two common layouts of a head, shared by family records.

Beside the trunk: all head keys have their own prefix (``mtp.``), as in Qwen's releases. After the trunk: the head is
one more decoder layer, numbered after the trunk's last layer, as in DeepSeek's releases.
"""

from __future__ import annotations

import copy

from transformers import PretrainedConfig

from mtp_train.families.spec import KeyRule, RecurrentKernels, SharedKey

AFTER_THE_TRUNK = "{trunk}layers.{layer}."
INDEXER = "self_attn.indexer"
"""transformers' name of the submodule that selects the keys to attend to."""


def expert_rules(layer: str, experts: str = "mlp.experts") -> tuple[KeyRule, ...]:
    """Return the rules for gated experts of a mixture that are stored as one tensor each.

    Args:
        layer: Native prefix of the decoder layer.
        experts: Name of the experts' module within the layer, the same in transformers and in the checkpoint.
    """
    native, ours = f"{layer}{experts}.{{expert}}", f"layer.{experts}"
    return (
        KeyRule(native=f"{native}.gate_proj.weight", ours=f"{ours}.gate_up_proj", stack="experts_concat", order=0),
        KeyRule(native=f"{native}.up_proj.weight", ours=f"{ours}.gate_up_proj", stack="experts_concat", order=1),
        KeyRule(native=f"{native}.down_proj.weight", ours=f"{ours}.down_proj", stack="experts"),
    )


def beside_the_trunk(*layer_rules: KeyRule) -> tuple[KeyRule, ...]:
    """Return the rules of a head under ``mtp.`` with Qwen's names; ``layer_rules`` precede the catch-all."""
    return (
        KeyRule(native="mtp.fc.weight", ours="proj.weight"),
        KeyRule(native="mtp.pre_fc_norm_embedding.weight", ours="embed_norm.weight"),
        KeyRule(native="mtp.pre_fc_norm_hidden.weight", ours="hidden_norm.weight"),
        KeyRule(native="mtp.norm.weight", ours="final_norm.weight"),
        *layer_rules,
        KeyRule(native="mtp.layers.{module}.{rest}", ours="layer.{rest}"),
    )


def after_the_trunk(*layer_rules: KeyRule, final_norm: str = "shared_head.norm") -> tuple[KeyRule, ...]:
    """Return the rules of a head that is stored as one more layer; ``layer_rules`` precede the catch-all."""
    return (
        KeyRule(native=f"{AFTER_THE_TRUNK}eh_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{AFTER_THE_TRUNK}enorm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{AFTER_THE_TRUNK}hnorm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{AFTER_THE_TRUNK}{final_norm}.weight", ours="final_norm.weight"),
        *layer_rules,
        KeyRule(native=f"{AFTER_THE_TRUNK}{{rest}}", ours="layer.{rest}"),
    )


def repeated_embedding(native: str) -> SharedKey:
    """Return the rule for a head's copy of the trunk's embedding."""
    return SharedKey(native=native, trunk="{trunk}embed_tokens.weight")


REPEATED_AFTER_THE_TRUNK = (
    repeated_embedding(f"{AFTER_THE_TRUNK}embed_tokens.weight"),
    SharedKey(native=f"{AFTER_THE_TRUNK}shared_head.head.weight", trunk="lm_head.weight"),
)
"""DeepSeek's releases repeat the embedding and the lm_head in the head's layer."""


def with_layers(config: PretrainedConfig, num_layers: int, **fields: object) -> PretrainedConfig:
    """Return a copy of a text config with ``num_layers`` layers and the values of ``fields``."""
    changed = copy.deepcopy(config)
    for name, value in {**fields, "num_hidden_layers": num_layers}.items():
        setattr(changed, name, value)
    return changed


def sparse(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the config of layers that are all mixtures of experts, even if the trunk's first layers are dense."""
    return with_layers(config, num_layers, mlp_layer_types=["sparse"] * num_layers)


def sparse_from_the_first(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the same for configs with the number of dense layers in place of a list of layer types."""
    return with_layers(config, num_layers, first_k_dense_replace=0)


def sparse_indexed(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the config of mixture-of-experts layers that all have an attention with its own indexer."""
    return with_layers(
        config,
        num_layers,
        mlp_layer_types=["sparse"] * num_layers,
        layer_types=["indexed_attention"] * num_layers,
        indexer_types=["full"] * num_layers,
    )


def sparse_full(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the config of mixture-of-experts layers with full attention, for trunks with several layer types."""
    return with_layers(
        config,
        num_layers,
        mlp_layer_types=["sparse"] * num_layers,
        layer_types=["full_attention"] * num_layers,
    )


KIMI_DELTA = RecurrentKernels(
    chunked="chunk_kimi_delta_attention",
    single="recurrent_kimi_delta_attention",
    conv="causal_conv1d_fn",
    rule="kimi_delta",
)
"""The functions of transformers' layers of Kimi Delta Attention, the same in every family."""
