"""MiniMax-M3: a mixture of experts with attention to selected blocks of keys; the head is such a layer too."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, Convention, engine_table, no
from mtp_train.families.layouts import AFTER_THE_TRUNK, INDEXER, end_rules, expert_rules, layers_of
from mtp_train.families.mechanisms.key_blocks import BlockIndexer
from mtp_train.families.spec import Borrowed, Declaration, Family, HeadLayer, KeyRule, Keys, TrunkTraits, Wiring

_MODULE = "{trunk}mtp.layers.{module}."
# vLLM's head reads the trunk's state after the final norm and recycles the layer's own output.
_VLLM = Convention(recycle="before_final_norm", zero_first_embedding=True)


def _gate_up_rules(native: str, ours: str) -> tuple[KeyRule, ...]:
    """Return the rules for two matrices of a release that transformers merges into one."""
    merged = f"{ours}gate_up_proj.weight"
    return (
        KeyRule(native=f"{native}gate_proj.weight", ours=merged, stack="concat", order=0),
        KeyRule(native=f"{native}up_proj.weight", ours=merged, stack="concat", order=1),
    )


def _layer_rules(layer: str) -> tuple[KeyRule, ...]:
    moe = f"{layer}block_sparse_moe."
    return (
        *expert_rules(layer, "block_sparse_moe.experts", ("w1", "w3", "w2")),
        *_gate_up_rules(f"{moe}shared_experts.", "layer.mlp.shared_experts."),
        KeyRule(native=f"{moe}e_score_correction_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{moe}{{rest}}", ours="layer.mlp.{rest}"),
        *(
            KeyRule(native=f"{layer}self_attn.index_{part}.{{rest}}", ours=f"layer.self_attn.indexer.{part}.{{rest}}")
            for part in ("q_proj", "k_proj", "q_norm", "k_norm")
        ),
        KeyRule(native=f"{layer}{{rest}}", ours="layer.{rest}"),
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
    declaration=Declaration(count="num_mtp_modules"),
    keys=Keys(
        trunk_prefixes=("language_model.model.", "model.language_model.", "model."),
        head_prefixes=("{trunk}mtp.",),
        rules=(
            *end_rules(_MODULE),
            *_layer_rules(f"{_MODULE}transformer_layer."),
        ),
        # Only the trunk has layers without experts.
        trunk_rules=(*_gate_up_rules(f"{AFTER_THE_TRUNK}mlp.", "layer.mlp."), *_layer_rules(AFTER_THE_TRUNK)),
        wrapper_names={
            "vision_tower.layers.": "vision_tower.vision_model.encoder.layers.",
            "multi_modal_projector.merge_linear_": "patch_merge_mlp.linear_",
        },
    ),
    wiring=Wiring(default=_VLLM, conventions={"vllm": _VLLM}),
    layer=HeadLayer(
        config=layers_of(layer_types="minimax_m3_sparse", mlp_layer_types="sparse"),
        borrowed=Borrowed.of("minimax_m3_vl", "MiniMaxM3VL", build_layer=_build_layer, frozen=INDEXER),
    ),
    trunk=TrunkTraits(only_with_vision=True, needs_transformers="5.23"),
    engines=engine_table(
        transformers=HEAD_IGNORED,
        sglang=no("has no MTP for this model"),
        llama_cpp=no("has no graph for this head"),
    ),
)
