"""The ``GgufHead`` record: llama.cpp's tensor names and metadata of a head, and the names that records share.

The source is llama.cpp's converter (``--mtp``) and loaders. All tables are keyed by the checkpoint's own names. This
module does not need the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mtp_train.checkpoints.gguf.fields import Field
from mtp_train.families.spec import RawConfig


@dataclass(frozen=True)
class Cut:
    """A native tensor that GGUF stores as two tensors, or with its rows in another order."""

    how: Literal["halves", "latent_kv", "query_pairs", "key_pairs"]
    """``halves``: two halves along the next to last axis. ``latent_kv``: each head's key part, transposed, and its
    value part. ``query_pairs``, ``key_pairs``: one tensor with the rows of each head's two halves interleaved."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class Join:
    """Native matrices that GGUF stores as one tensor."""

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
    names: Mapping[str, str]
    """Native head key without its root, to the name within its block. Tensors of keys with ``{expert}`` are stacked."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Native head key without its root, to the change of a tensor that is split or reordered."""
    joined: Mapping[str, Join] = field(default_factory=dict)
    """Name within the block to the native tensors that are concatenated."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Native head key without its root, to a name outside of the blocks, for parts that the trunk has too."""
    generated: Mapping[str, Callable[[RawConfig], list[float] | None]] = field(default_factory=dict)
    """Name to a function of the text config (defaults filled in) that returns the tensor's values; None: no tensor."""
    fields: Mapping[str, Field]
    """Metadata fields. The writer adds the numbers of blocks and head modules."""
    roots: tuple[str, ...] = ("{trunk}layers.{layer}.",)
    """Prefixes of native head keys, longest first. A prefix without a number belongs to the first module."""
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 for checkpoints that store w for models that multiply by 1 + w."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Kind of special token to its text, for tokens that the tokenizer's files do not declare."""


def weights(names: Mapping[str, str]) -> dict[str, str]:
    """Return names of modules as names of their weights."""
    return {f"{native}.weight": f"{ours}.weight" for native, ours in names.items()}


NEXTN = weights(
    {
        "eh_proj": "nextn.eh_proj",
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "embed_tokens": "nextn.embed_tokens",
        "shared_head.norm": "nextn.shared_head_norm",
        "shared_head.head": "nextn.shared_head_head",
    }
)
ATTENTION = {
    **weights(
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        }
    ),
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}
LATENT_ATTENTION = weights(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.o_proj": "attn_output",
    }
)
INDEXER = {
    **weights(
        {
            "self_attn.indexer.wq_b": "indexer.attn_q_b",
            "self_attn.indexer.wk": "indexer.attn_k",
            "self_attn.indexer.k_norm": "indexer.k_norm",
            "self_attn.indexer.weights_proj": "indexer.proj",
        }
    ),
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
}
# llama.cpp has two names for the norm in front of the MLP, depending on the architecture.
POST_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
BEFORE_FFN = {"post_attention_layernorm.weight": "ffn_norm.weight"}
PARTS = ("gate", "up", "down")
DENSE = {f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in PARTS}
EACH_EXPERT = {f"mlp.experts.{{expert}}.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in PARTS}
ROUTER = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **EACH_EXPERT,
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in PARTS},
}
