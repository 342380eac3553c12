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

from mtp_train.families.spec import HeadLayer, KeyRule, Keys, LayersConfig, RecurrentKernels

AFTER_THE_TRUNK = "{trunk}layers.{layer}."
BESIDE_THE_TRUNK = "mtp.layers.{module}."
INDEXER = "self_attn.indexer"
"""transformers' name of the submodule that selects the keys to attend to."""
WRAPPED = ("model.language_model.", "model.")
"""Decoder prefixes of families whose releases are vision-language models, and of their text-only checkpoints."""


def weights(names: Mapping[str, str], ours: str = "") -> dict[str, str]:
    """Return the key names of matrices and norms that a release and this package name differently."""
    return {f"{name}.weight": f"{ours}{mine}.weight" for name, mine in names.items()}


def key_rules(prefix: str, names: Mapping[str, str]) -> tuple[KeyRule, ...]:
    """Return the rules of keys under ``prefix``: the rest of the native key to our key, both as in :class:`KeyRule`."""
    return tuple(KeyRule(native=prefix + native, ours=ours) for native, ours in names.items())


def experts(
    native: str = "mlp.experts", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Return the key names of a layer's gated experts that are stored as one tensor each.

    ``native`` is the native name of their module within the layer, ``names`` those of the gate, up and down matrices.
    """
    merged = zip(names, ("gate_up_proj", "gate_up_proj", "down_proj"), strict=True)
    return {f"{native}.{{expert}}.{name}.weight": f"layer.mlp.experts.{ours}" for name, ours in merged}


ENDS = weights({"eh_proj": "proj", "enorm": "embed_norm", "hnorm": "hidden_norm"})
"""DeepSeek's names of a head module's parts in front of its layer."""
FINAL_NORM = {"final_layernorm.weight": "final_norm.weight"}
LAYER = {"{rest}": "layer.{rest}"}
"""The parts of a head's layer with names as in transformers. Last in a table, because it matches every key."""
_QWEN_ENDS = weights(
    {"fc": "proj", "pre_fc_norm_embedding": "embed_norm", "pre_fc_norm_hidden": "hidden_norm", "norm": "final_norm"}
)


def beside_the_trunk(names: Mapping[str, str] = {}, **keys: Any) -> Keys:
    """Return the keys of a head under ``mtp.`` with Qwen's names.

    Args:
        names: Parts of the layer that a release and transformers name differently, as for :func:`key_rules`.
    """
    rules = (*key_rules("mtp.", _QWEN_ENDS), *key_rules(BESIDE_THE_TRUNK, {**names, **LAYER}))
    return Keys(head_prefixes=("mtp.",), rules=rules, **keys)


def after_the_trunk(names: Mapping[str, str] = {}, *, final_norm: str = "shared_head.norm", **keys: Any) -> Keys:
    """Return the keys of a head that is stored as one more layer; arguments as in :func:`beside_the_trunk`."""
    ends = {**ENDS, f"{final_norm}.weight": "final_norm.weight"}
    return Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=key_rules(AFTER_THE_TRUNK, {**ends, **names, **LAYER}), **keys)


EXPERTS_BESIDE_THE_TRUNK = beside_the_trunk(experts())
LM_HEAD_AFTER_THE_TRUNK = {f"{AFTER_THE_TRUNK}shared_head.head.weight": "lm_head.weight"}
REPEATED_AFTER_THE_TRUNK = {
    f"{AFTER_THE_TRUNK}embed_tokens.weight": "{trunk}embed_tokens.weight",
    **LM_HEAD_AFTER_THE_TRUNK,
}
"""DeepSeek's releases repeat the embedding and the lm_head in the head's layer."""
EXPERTS_AFTER_THE_TRUNK = after_the_trunk(experts(), shared=REPEATED_AFTER_THE_TRUNK)
"""The keys of DeepSeek's releases, and of those that follow them."""


def with_layers(config: PretrainedConfig, num_layers: int, **fields: object) -> PretrainedConfig:
    """Return a copy of a text config with ``num_layers`` layers and the values of ``fields``."""
    changed = copy.deepcopy(config)
    changed.update({**fields, "num_hidden_layers": num_layers})
    return changed


def layers_of(**fields: object) -> LayersConfig:
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
    """Return a ``build_layer`` that composes two of the model's classes, named without its prefix."""

    def build(classes: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
        norms = classes.make_norm(config), classes.make_norm(config)
        parts = classes.cls(classes.prefix + attention)(config, layer_idx), classes.cls(classes.prefix + mlp)(config)
        return AttentionThenMlp(*parts, norms)

    return build
