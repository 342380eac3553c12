"""MiniMax-M3: a mixture with attention to chosen blocks of keys, the head a layer of the same kind."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, engine_table, no
from mtp_train.families.key_blocks import BlockIndexer
from mtp_train.families.layouts import INDEXER, with_layers
from mtp_train.families.spec import Borrowed, Convention, CountField, Family, KeyRule

_MODULE = "{trunk}mtp.layers.{module}."
_LAYER = f"{_MODULE}transformer_layer."
_MOE, _SHARED = f"{_LAYER}block_sparse_moe.", "shared_experts."
_GATE_UP = "layer.mlp.experts.gate_up_proj"
_SHARED_GATE_UP = "layer.mlp.shared_experts.gate_up_proj.weight"
# vLLM reads the trunk after its final norm and hands on the layer's own output.
_VLLM = Convention(recycle="before_final_norm", zero_first_embedding=True)


def _indexer_rules(layer: str) -> tuple[KeyRule, ...]:
    return tuple(
        KeyRule(native=f"{layer}self_attn.index_{part}.{{rest}}", ours=f"layer.self_attn.indexer.{part}.{{rest}}")
        for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    )


def _sparse(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(
        text_config,
        num_modules,
        layer_types=["minimax_m3_sparse"] * num_modules,
        mlp_layer_types=["sparse"] * num_modules,
    )


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: Any = borrowed.cls(borrowed.layer)(config, layer_idx)
    layer.self_attn.indexer = BlockIndexer(layer.self_attn.indexer, config, borrowed.cls("apply_rotary_pos_emb"))
    built: nn.Module = layer
    return built


MINIMAX_M3 = Family(
    name="minimax_m3",
    title="MiniMax-M3",
    model_types=("minimax_m3_vl_text",),
    count=CountField(name="num_mtp_modules"),
    head_config_fields=("num_mtp_modules",),
    trunk_prefixes=("language_model.model.", "model.language_model.", "model."),
    head_prefixes=("{trunk}mtp.",),
    key_rules=(
        KeyRule(native=f"{_MODULE}eh_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_MODULE}enorm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_MODULE}hnorm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_MODULE}final_layernorm.weight", ours="final_norm.weight"),
        KeyRule(native=f"{_MOE}experts.{{expert}}.w1.weight", ours=_GATE_UP, stack="experts_concat", order=0),
        KeyRule(native=f"{_MOE}experts.{{expert}}.w3.weight", ours=_GATE_UP, stack="experts_concat", order=1),
        KeyRule(native=f"{_MOE}experts.{{expert}}.w2.weight", ours="layer.mlp.experts.down_proj", stack="experts"),
        KeyRule(native=f"{_MOE}{_SHARED}gate_proj.weight", ours=_SHARED_GATE_UP, stack="concat", order=0),
        KeyRule(native=f"{_MOE}{_SHARED}up_proj.weight", ours=_SHARED_GATE_UP, stack="concat", order=1),
        KeyRule(native=f"{_MOE}e_score_correction_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{_MOE}{{rest}}", ours="layer.mlp.{rest}"),
        *_indexer_rules(_LAYER),
        KeyRule(native=f"{_LAYER}{{rest}}", ours="layer.{rest}"),
    ),
    trunk_rules=_indexer_rules("{trunk}layers.{layer}."),
    default=_VLLM,
    conventions={"vllm": _VLLM},
    head_layer_config=_sparse,
    borrowed=Borrowed(
        python_module="transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
        layer="MiniMaxM3VLDecoderLayer",
        norm="MiniMaxM3VLRMSNorm",
        rotary="MiniMaxM3VLRotaryEmbedding",
        build_layer=_build_layer,
        frozen=INDEXER,
    ),
    only_with_vision=True,
    needs_transformers="5.23",
    engines=engine_table(
        transformers=HEAD_IGNORED,
        sglang=no("has no MTP for this model"),
        llama_cpp=no("has no graph for this head"),
    ),
)
