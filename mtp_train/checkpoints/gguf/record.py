"""The ``GgufHead`` record of a head's tensor names and metadata in GGUF, and the names and fields that records share.

The source is llama.cpp's converter (``--mtp``) and loaders. Tensor names are keyed by our parameters, and the families'
own tables map the checkpoints' keys to these. Names and defaults of metadata fields equal the converter's. This module
does not need the ``gguf`` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.layouts import weights
from mtp_train.families.spec import RawConfig

Value = int | float | bool | str | list[int] | list[bool] | list[float] | None
"""The value of a field, whose Python type determines the GGUF type; None for no field."""
Field = Callable[[RawConfig], Value]
"""Text config (defaults filled in) to a value."""
NUM_MODULES = "num_head_modules"
"""Key under which the writer adds the number of head modules to the config that the readers get."""
_FULL = "full_attention"
_ROUTERS = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}
_ROUTER_FIELDS = ("score_function", "scoring_func", "score_func", "moe_router_activation", "expert_selection_fn")


class Cut(NamedTuple):
    """A parameter that GGUF stores as two tensors, or with its rows in another order."""

    how: Literal["halves", "latent_kv", "num_attention_heads", "num_key_value_heads"]
    """``halves``: two halves along the next to last axis. ``latent_kv``: each head's key part, transposed, and its
    value part. The field with the number of heads: one tensor with the rows of each head's two halves interleaved."""
    names: tuple[str, ...]


class Join(NamedTuple):
    """Matrices that GGUF stores as one tensor."""

    axis: Literal[0, 1]
    """Axis of the concatenation: 0 appends rows, 1 appends columns."""
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GgufHead:
    """GGUF names and metadata of the heads of one llama.cpp architecture."""

    arch: str
    """llama.cpp's name of the architecture, and the prefix of ``fields``."""
    pre_tokenizer: str
    """llama.cpp's name of the pre-tokenizer. Its converter derives the name from a hash of the tokenization of a fixed
    text, which fails for a tokenizer with added tokens. Loaders need a known name, although drafts are token ids."""
    names: Mapping[str, str | Cut]
    """Parameter of a head module to its name within the block, or to those that it is cut into."""
    joined: Mapping[str, Join] = field(default_factory=dict)
    """Name within the block to the parameters that are concatenated."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Parameter of a head module to a name outside of the blocks, for parts that the trunk has too."""
    generated: Mapping[str, Callable[[RawConfig], list[float] | None]] = field(default_factory=dict)
    """Name to a function of the text config (defaults filled in) that returns the tensor's values; None: no tensor."""
    fields: Mapping[str, Field]
    """Metadata fields. The writer adds the numbers of blocks and head modules."""
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 for checkpoints that store w for models that multiply by 1 + w."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Kind of special token to its text, for tokens that the tokenizer's files do not declare."""


def _first(kind: Callable[[Any], Value], *names: str, default: Value = None) -> Field:
    """Read a value from the first of these fields that the config has."""

    def read(config: RawConfig) -> Value:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else kind(value)

    return read


whole, real, flag = (partial(_first, kind) for kind in (int, float, bool))


def total(*names: str) -> Field:
    return lambda config: sum(int(config[name]) for name in names)


def product(*names: str) -> Field:
    return lambda config: math.prod(int(config[name]) for name in names)


def rotated(dims: str, partial: float) -> Field:
    """Compute the number of rotated dimensions of an attention head.

    Args:
        dims: Field with the head's size.
        partial: Rotated share if the config has none.
    """

    def read(config: RawConfig) -> Value:
        size = config.get(dims) or config["hidden_size"] // config["num_attention_heads"]
        # The release's own field comes first, because transformers may ignore it.
        share = config.get("partial_rotary_factor") or rope_of(config).get("partial_rotary_factor", partial)
        return int(size * share)

    return read


def sections(config: RawConfig) -> Value:
    """Read the split of the rotary dimensions over time, height and width, padded to four."""
    found = rope_of(config).get("mrope_section")
    return None if found is None else ([int(size) for size in found] + [0] * 4)[:4]


def of_kind(kind: str, field: str = "layer_types", *, modules: bool | None = None) -> Field:
    """List for each layer whether it is of a kind; ``modules`` is the value of head modules, None for none."""

    def read(config: RawConfig) -> Value:
        kinds = config.get(field)
        heads = [] if modules is None else [modules] * config[NUM_MODULES]
        return None if kinds is None else [found == kind for found in kinds] + heads

    return read


def router(default: str | None = None) -> Field:
    """Read llama.cpp's number of the function that turns router logits into weights."""

    def read(config: RawConfig) -> Value:
        name = next((config[field] for field in _ROUTER_FIELDS if field in config), default)
        if name is not None and name not in _ROUTERS:
            raise UnsupportedModelError(
                f"config.json: router function '{name}' is unknown to GGUF; expected one of {', '.join(_ROUTERS)}. "
                "Export without --gguf."
            )
        return None if name is None else _ROUTERS[name]

    return read


def either(*fields: Field) -> Field:
    """Return the first value of these readers that is not None."""
    return lambda config: next((value for read in fields if (value := read(config)) is not None), None)


def limits(name: str) -> Field:
    """Read one bound per block; 0 means no bound, also for blocks beyond the config's list."""

    def read(config: RawConfig) -> Value:
        found = config.get(name)
        blocks = config["num_hidden_layers"] + config[NUM_MODULES]
        return None if found is None else [float(bound or 0.0) for bound in [*found, *[0.0] * blocks][:blocks]]

    return read


def always(value: Value) -> Field:
    return lambda config: value


def rope_of(config: RawConfig, kind: str = _FULL) -> RawConfig:
    """Return the rotary embedding's parameters, for layer type ``kind`` if layer types have different ones."""
    parameters: RawConfig = config.get("rope_parameters") or {}
    return parameters.get(kind, parameters)


def rope_value(
    *names: str, kinds: tuple[str, ...] = (), of: str = _FULL, kind: Callable[[Any], Value] = float
) -> Field:
    """Read a number from the rotary parameters; with ``kinds``, only if the scaling is one of these."""

    def read(config: RawConfig) -> Value:
        rope = rope_of(config, of)
        value = next((rope[name] for name in names if name in rope), None)
        wanted = not kinds or rope.get("rope_type") in kinds
        return kind(value) if wanted and value is not None else None

    return read


def _rope_type(of: str) -> Field:
    def read(config: RawConfig) -> Value:
        kind = rope_of(config, of).get("rope_type", "default")
        if kind not in ("default", "linear", "yarn"):
            raise UnsupportedModelError(
                f"config.json: rope_type '{kind}' cannot be written to GGUF here; expected default, linear or yarn. "
                "Export without --gguf and use llama.cpp's own converter."
            )
        return None if kind == "default" else str(kind)

    return read


def rope_scaling(of: str) -> Mapping[str, Field]:
    yarn = partial(rope_value, kinds=("yarn",), of=of)
    return {
        "rope.scaling.type": _rope_type(of),
        "rope.scaling.factor": rope_value("factor", kinds=("linear", "yarn"), of=of),
        "rope.scaling.original_context_length": yarn("original_max_position_embeddings", kind=int),
        "rope.scaling.yarn_ext_factor": yarn("extrapolation_factor"),
        "rope.scaling.yarn_attn_factor": yarn("attention_factor", "attn_factor"),
        "rope.scaling.yarn_beta_fast": yarn("beta_fast"),
        "rope.scaling.yarn_beta_slow": yarn("beta_slow"),
    }


SIGMOID_ROUTER = always(_ROUTERS["sigmoid"])
FIELDS: Mapping[str, Field] = {
    "context_length": whole("max_position_embeddings"),
    "embedding_length": whole("hidden_size"),
    "feed_forward_length": whole("intermediate_size"),
    "attention.head_count": whole("num_attention_heads"),
    "attention.head_count_kv": whole("num_key_value_heads"),
    "attention.key_length": whole("head_dim"),
    "attention.value_length": whole("head_dim"),
    "attention.layer_norm_rms_epsilon": real("rms_norm_eps"),
    "attention.layer_norm_epsilon": real("layer_norm_epsilon", "layer_norm_eps"),
    "attention.sliding_window": whole("sliding_window"),
    "attention.q_lora_rank": whole("q_lora_rank"),
    "attention.indexer.head_count": whole("index_n_heads"),
    "attention.indexer.key_length": whole("index_head_dim"),
    "attention.indexer.top_k": whole("index_topk"),
    "rope.freq_base": rope_value("rope_theta"),
    "rope.dimension_sections": sections,
    **rope_scaling(_FULL),
    "ssm.conv_kernel": whole("linear_conv_kernel_dim", "conv_kernel", "short_conv_kernel_size"),
    "ssm.state_size": whole("linear_key_head_dim", "ssm_state_size"),
    "ssm.group_count": whole("linear_num_key_heads", "n_groups"),
    "expert_count": whole("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": whole("num_experts_per_tok"),
    "expert_group_count": whole("n_group"),
    "expert_group_used_count": whole("topk_group"),
    "expert_shared_count": whole("n_shared_experts"),
    "expert_feed_forward_length": whole("moe_intermediate_size"),
    "expert_gating_func": router(),
    "expert_weights_scale": real("routed_scaling_factor"),
    "leading_dense_block_count": whole("first_k_dense_replace"),
}
"""Fields of every architecture whose config has them."""
LATENT_FIELDS: Mapping[str, Field] = {
    "vocab_size": whole("vocab_size"),
    "attention.kv_lora_rank": whole("kv_lora_rank"),
    "attention.key_length": total("kv_lora_rank", "qk_rope_head_dim"),
    "attention.key_length_mla": total("qk_nope_head_dim", "qk_rope_head_dim"),
    "attention.value_length_mla": whole("v_head_dim"),
    "rope.dimension_count": whole("qk_rope_head_dim"),
}
"""Fields of latent attention, which GGUF describes as attention over one key-value head, the latent."""


PARTS = ("gate", "up", "down")
NAMES: Mapping[str, str | Cut] = {
    **weights(
        {
            "proj": "nextn.eh_proj",
            "embed_norm": "nextn.enorm",
            "hidden_norm": "nextn.hnorm",
            "final_norm": "nextn.shared_head_norm",
            "layer.input_layernorm": "attn_norm",
            **{f"layer.self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
            "layer.self_attn.o_proj": "attn_output",
            "layer.self_attn.g_proj": "attn_gate",
            "layer.self_attn.q_norm": "attn_q_norm",
            "layer.self_attn.k_norm": "attn_k_norm",
            "layer.self_attn.q_a_proj": "attn_q_a",
            "layer.self_attn.q_a_layernorm": "attn_q_a_norm",
            "layer.self_attn.q_b_proj": "attn_q_b",
            "layer.self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "layer.self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "layer.self_attn.indexer.wq_b": "indexer.attn_q_b",
            "layer.self_attn.indexer.wk": "indexer.attn_k",
            "layer.self_attn.indexer.k_norm": "indexer.k_norm",
            "layer.self_attn.indexer.weights_proj": "indexer.proj",
            "layer.mlp.gate": "ffn_gate_inp",
            "layer.mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            **{f"layer.mlp.{part}_proj": f"ffn_{part}" for part in PARTS},
            **{f"layer.mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in PARTS},
            **{f"layer.mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in PARTS},
        }
    ),
    **{f"layer.self_attn.{part}_proj.bias": f"attn_{part}.bias" for part in "qkv"},
    "layer.self_attn.sinks": "attn_sinks.weight",
    "layer.self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "layer.self_attn.kv_b_proj.weight": Cut("latent_kv", ("attn_k_b.weight", "attn_v_b.weight")),
    "layer.mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "layer.mlp.experts.gate_up_proj": Cut("halves", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    "layer.mlp.experts.down_proj": "ffn_down_exps.weight",
}
"""Names of the parameters of most heads."""
EMBEDDING_NAME, LM_HEAD_NAME = "nextn.embed_tokens.weight", "nextn.shared_head_head.weight"
"""Names of a module's own matrices over the vocabulary, or of the trunk's that releases repeat there."""
# llama.cpp has two names for the norm in front of the MLP, depending on the architecture.
POST_ATTENTION = {"layer.post_attention_layernorm.weight": "post_attention_norm.weight"}
BEFORE_FFN = {"layer.post_attention_layernorm.weight": "ffn_norm.weight"}
AT_THE_END = {"final_norm.weight": "layer_output_norm.weight"}
"""The name of the head's final norm in architectures whose blocks all may end in one."""
