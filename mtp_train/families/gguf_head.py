"""The form of a record that says how llama.cpp names and describes a head, and the names that records share.

Read from llama.cpp's converter (``--mtp``) and loaders. Everything is keyed by the checkpoint's own names, and nothing
here needs the ``gguf`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mtp_train.families.gguf_fields import Field
from mtp_train.families.spec import RawConfig


@dataclass(frozen=True)
class Cut:
    """A native tensor that GGUF keeps as two, or in another order."""

    how: Literal["halves", "latent_kv", "query_pairs", "key_pairs"]
    """``halves``: along the next to last axis. ``latent_kv``: a head's key part, transposed, and its value part.
    ``query_pairs``, ``key_pairs``: rows of each head's first and second half in turn."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class Join:
    """Native matrices that GGUF keeps as one."""

    axis: Literal[0, 1]
    """0: one below the other. 1: each row made of theirs, one after the other."""
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GgufHead:
    """How the heads of some model types are named and described in GGUF."""

    arch: str
    """llama.cpp's name of the architecture, and the prefix of ``fields``."""
    pre_tokenizer: str
    """llama.cpp's name of the pre-tokenizer. Its converter knows one by a hash of what the tokenizer makes of a text,
    which fails for a tokenizer with one token more. Loaders want a name they know; a draft is made of token ids."""
    names: Mapping[str, str]
    """Native head key without its root, to the name within its block. ``{expert}``: one each, stacked."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The same for native tensors that become two or change their order."""
    joined: Mapping[str, Join] = field(default_factory=dict)
    """Name within the block to the native tensors that it is made of."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Native head key without its root, to a name that belongs to no block: of what the trunk has as well."""
    generated: Mapping[str, Callable[[RawConfig], list[float] | None]] = field(default_factory=dict)
    """Name to what is made of the text config, defaults filled in; None makes nothing."""
    fields: Mapping[str, Field]
    """Metadata. Counts of blocks and head modules are the writer's."""
    roots: tuple[str, ...] = ("{trunk}layers.{layer}.",)
    """What native head keys start with, longest first. One without a number belongs to the first module."""
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 where a checkpoint stores w and the model computes with 1 + w."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Kind of special token to its text, where the tokenizer's own files do not say it."""


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
# The norm before the feed-forward part has two names, by what stood first in llama.cpp's own model.
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
