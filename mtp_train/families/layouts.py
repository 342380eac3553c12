"""Shared parts of family records: key rules of the two common layouts of a head, layer configs, and a composed layer.

Beside the trunk: all head keys have their own prefix (``mtp.``), as in Qwen's releases. After the trunk: the head is
one more decoder layer, numbered after the trunk's last layer, as in DeepSeek's releases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.spec import HeadLayer, KeyRule, Keys, RecurrentKernels, SharedKey

AFTER_THE_TRUNK = "{trunk}layers.{layer}."
BESIDE_THE_TRUNK = "mtp.layers.{module}."
INDEXER = "self_attn.indexer"
"""transformers' name of the submodule that selects the keys to attend to."""
WRAPPED = ("model.language_model.", "model.")
"""Decoder prefixes of families whose releases are vision-language models, and of their text-only checkpoints."""


def weight_rules(prefix: str, names: Mapping[str, str], ours: str = "") -> tuple[KeyRule, ...]:
    """Return the rules of weights that a release and this package name differently: name in a release to our name."""
    return tuple(KeyRule(native=f"{prefix}{name}.weight", ours=f"{ours}{mine}.weight") for name, mine in names.items())


def end_rules(
    prefix: str,
    *,
    proj: str = "eh_proj",
    embed_norm: str = "enorm",
    hidden_norm: str = "hnorm",
    final_norm: str | None = "final_layernorm",
) -> tuple[KeyRule, ...]:
    """Return the rules of a head module's parts around its layer, with DeepSeek's names where none is given."""
    names = {proj: "proj", embed_norm: "embed_norm", hidden_norm: "hidden_norm"}
    return weight_rules(prefix, names if final_norm is None else {**names, final_norm: "final_norm"})


def expert_rules(
    layer: str, experts: str = "mlp.experts", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[KeyRule, ...]:
    """Return the rules for gated experts of a mixture that are stored as one tensor each.

    ``experts`` is the native name of their module within the layer, ``names`` those of the gate, up and down matrices.
    """
    ours, native = "layer.mlp.experts", [f"{layer}{experts}.{{expert}}.{name}.weight" for name in names]
    return (
        KeyRule(native=native[0], ours=f"{ours}.gate_up_proj"),
        KeyRule(native=native[1], ours=f"{ours}.gate_up_proj"),
        KeyRule(native=native[2], ours=f"{ours}.down_proj"),
    )


def beside_the_trunk(*layer_rules: KeyRule, **keys: Any) -> Keys:
    """Return the keys of a head under ``mtp.`` with Qwen's names.

    Args:
        *layer_rules: Rules of the layer, which precede the catch-all.
    """
    ends = {"proj": "fc", "embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}
    rules = (*end_rules("mtp.", **ends, final_norm="norm"), *layer_rules)
    rest = KeyRule(native=f"{BESIDE_THE_TRUNK}{{rest}}", ours="layer.{rest}")
    return Keys(head_prefixes=("mtp.",), rules=(*rules, rest), **keys)


def after_the_trunk(*layer_rules: KeyRule, final_norm: str = "shared_head.norm", **keys: Any) -> Keys:
    """Return the keys of a head that is stored as one more layer; arguments as in :func:`beside_the_trunk`."""
    rest = KeyRule(native=f"{AFTER_THE_TRUNK}{{rest}}", ours="layer.{rest}")
    rules = (*end_rules(AFTER_THE_TRUNK, final_norm=final_norm), *layer_rules, rest)
    return Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=rules, **keys)


REPEATED_AFTER_THE_TRUNK = (
    SharedKey(native=f"{AFTER_THE_TRUNK}embed_tokens.weight", trunk="{trunk}embed_tokens.weight"),
    SharedKey(native=f"{AFTER_THE_TRUNK}shared_head.head.weight", trunk="lm_head.weight"),
)
"""DeepSeek's releases repeat the embedding and the lm_head in the head's layer."""
EXPERTS_AFTER_THE_TRUNK = after_the_trunk(*expert_rules(AFTER_THE_TRUNK), shared=REPEATED_AFTER_THE_TRUNK)
"""The keys of DeepSeek's releases, and of those that follow them."""


def with_layers(config: PretrainedConfig, num_layers: int, **fields: object) -> PretrainedConfig:
    """Return a copy of a text config with ``num_layers`` layers and the values of ``fields``."""
    changed = copy.deepcopy(config)
    for name, value in {**fields, "num_hidden_layers": num_layers}.items():
        setattr(changed, name, value)
    return changed


def layers_of(**fields: object) -> Callable[[PretrainedConfig, int], PretrainedConfig]:
    """Return a ``HeadLayer.config`` that sets fields of the text config.

    Args:
        **fields: A string is the kind of every layer: it becomes a list with an entry for each. Other values are set.
    """

    def config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
        values = {
            name: [value] * num_modules if isinstance(value, str) else copy.copy(value)
            for name, value in fields.items()
        }
        return with_layers(text_config, num_modules, **values)

    return config


full = layers_of(layer_types="full_attention")
sparse = layers_of(mlp_layer_types="sparse")
sparse_full = layers_of(mlp_layer_types="sparse", layer_types="full_attention")
sparse_from_the_first = layers_of(first_k_dense_replace=0)
every_layer_sparse = layers_of(layer_types="full_attention", mlp_only_layers=[], decoder_sparse_step=1)
dense_sliding = layers_of(layer_types="sliding_attention", mlp_layer_types="dense")
sparse_indexed = layers_of(mlp_layer_types="sparse", layer_types="indexed_attention", indexer_types="full")

KIMI_DELTA = RecurrentKernels(
    chunked="chunk_kimi_delta_attention",
    single="recurrent_kimi_delta_attention",
    rule="kimi_delta",
)
"""The functions of transformers' layers of Kimi Delta Attention, the same in every family."""


class AttentionThenMlp(nn.Module):
    """A pre-norm decoder layer, composed of an attention and an MLP that transformers has only in larger layers.

    The attention returns a tuple with its output as first element; ``norms`` are the norms in front of the two.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn = attention
        self.mlp = mlp

    def forward(self, hidden_states: Tensor, **of_attention: Any) -> Tensor:
        """Run the layer, (B, T, D) to (B, T, D); arguments as in transformers' decoder layers."""
        attended, *_ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **of_attention)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def attention_then_mlp(attention: str, mlp: str) -> Callable[[HeadLayer, PretrainedConfig, int], nn.Module]:
    """Return a ``build_layer`` that composes classes of the model's Python module."""

    def build(classes: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
        norms = classes.make_norm(config), classes.make_norm(config)
        return AttentionThenMlp(classes.cls(attention)(config, layer_idx), classes.cls(mlp)(config), norms)

    return build
