"""Heads beside their trunk, under a prefix of their own: EXAONE, Mellum 2, ERNIE-4.5, LongCat-Flash, MiniMax-M3.

Each is one module around a layer of the trunk's own class; ERNIE-4.5's is dense, has no final norm, and its keys are
``model.mtp_*``. LongCat-Flash's trunk has double layers, its head one latent attention and one dense MLP. MiniMax-M3's
trunk and head attend to selected blocks of keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, USE_MTP, ZERO_FIRST, Convention, engine_table, no
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    BESIDE_THE_TRUNK,
    INDEXER,
    AttentionThenMlp,
    beside_the_trunk,
    dense_sliding,
    end_rules,
    expert_rules,
    layers_of,
    with_layers,
)
from mtp_train.families.mechanisms.key_blocks import BlockIndexer
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    SharedKey,
    TrunkTraits,
    Wiring,
)


def _dense_with_rotary(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # As in engines: without mtp_layer_types the head has the type of the trunk's first layer, as a rule a sliding one.
    # In this trunk only sliding layers use rotary embeddings, but the head always does. Full attention in the head is
    # therefore a sliding layer whose window covers every position. All modules share a window; releases have one.
    fields = text_config.to_dict()
    kind = (fields.get("mtp_layer_types") or fields["layer_types"])[0]
    window = (fields.get("mtp_sliding_windows") or [None])[0] or fields["sliding_window"]
    if kind == "full_attention":
        window = fields["max_position_embeddings"]
    return dense_sliding(with_layers(text_config, num_modules, sliding_window=window), num_modules)


def _as_the_first(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # As in vLLM: the types of the trunk's first layers. In releases these are sliding, and only sliding layers use
    # rotary embeddings.
    return with_layers(text_config, num_modules, layer_types=text_config.layer_types[:num_modules])


EXAONE_MOE = Family(
    name="exaone_moe",
    title="K-EXAONE",
    model_types=("exaone_moe",),
    declaration=Declaration(count="num_nextn_predict_layers", others=("mtp_layer_types", "mtp_sliding_windows")),
    keys=beside_the_trunk(),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention()}),
    layer=HeadLayer(config=_dense_with_rotary, borrowed=Borrowed.of("exaone_moe", "ExaoneMoe")),
    trunk=TrunkTraits(masks_by_layer_type=True),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)

EXAONE4_5 = Family(
    name="exaone4_5",
    title="EXAONE 4.5",
    model_types=("exaone4_5",),
    declaration=Declaration(
        # Releases have the count in the text config. vLLM reads it from the whole config, which lacks it, and takes 1.
        count="num_nextn_predict_layers",
        implied=1,
        others=("mtp_share_layers",),
    ),
    keys=beside_the_trunk(trunk_prefixes=("model.language_model.",)),
    wiring=Wiring(conventions={"vllm": Convention()}),
    layer=HeadLayer(config=_as_the_first, borrowed=Borrowed.of("exaone4", "Exaone4")),
    trunk=TrunkTraits(only_with_vision=True, masks_by_layer_type=True),
    engines=engine_table(
        transformers=HEAD_IGNORED, sglang=no("has no class for this model"), llama_cpp=LLAMA_CPP_KEEPS
    ),
)


def _as_declared(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # The defaults are transformers'.
    fields = text_config.to_dict()
    return with_layers(
        text_config,
        num_modules,
        layer_types=list(fields.get("mtp_layer_types") or ["sliding_attention"] * num_modules),
        mlp_layer_types=list(fields.get("mtp_mlp_layer_types") or ["sparse"] * num_modules),
    )


MELLUM = Family(
    name="mellum",
    title="Mellum 2",
    model_types=("mellum",),
    declaration=Declaration(count="num_nextn_predict_layers", others=("mtp_layer_types", "mtp_mlp_layer_types")),
    keys=beside_the_trunk(*expert_rules(BESIDE_THE_TRUNK)),
    # vLLM runs transformers' own head.
    wiring=Wiring(conventions={"vllm": Convention()}),
    layer=HeadLayer(config=_as_declared, borrowed=Borrowed.of("mellum", "Mellum")),
    trunk=TrunkTraits(masks_by_layer_type=True),
    engines=engine_table(
        transformers=USE_MTP,
        sglang=no("loads the trunk and has no MTP for this model"),
        llama_cpp=no("has no graph for this head, and its converter refuses the head's keys"),
    ),
)


def _never_sparse(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, moe_layer_start_index=num_modules)


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    title="ERNIE-4.5 MoE",
    model_types=("ernie4_5_moe",),
    keys=Keys(
        head_prefixes=("model.mtp_",),
        rules=(
            KeyRule(native="model.mtp_linear_proj.{module}.weight", ours="proj.weight"),
            KeyRule(native="model.mtp_emb_norm.{module}.weight", ours="embed_norm.weight"),
            KeyRule(native="model.mtp_hidden_norm.{module}.weight", ours="hidden_norm.weight"),
            KeyRule(native="model.mtp_block.{module}.{rest}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(
        final_norm=False,
        # vLLM's head rotates halves like Llama, vLLM's trunk rotates neighbouring channels, as both do here. vLLM's
        # drafts differ from ours for this reason alone.
        default=ZERO_FIRST,
        conventions={"vllm": ZERO_FIRST, "sglang": ZERO_FIRST},
    ),
    layer=HeadLayer(config=_never_sparse, borrowed=Borrowed.of("ernie4_5_moe", "Ernie4_5_Moe")),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("its converter drops this head")),
)


_LONGCAT = "model.mtp.layers.{module}."


def _two_for_one(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # One layer of the trunk counts as two.
    return with_layers(text_config, 2 * num_modules)


def _attention_then_mlp(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    return AttentionThenMlp(
        borrowed.cls(borrowed.layer)(config, layer_idx),
        borrowed.cls("LongcatFlashMLP")(config),
        (borrowed.make_norm(config), borrowed.make_norm(config)),
    )


@contextmanager
def _without_idle_gates(keys: Collection[str]) -> Iterator[None]:
    """Load a trunk without gate matrices for its zero-computation experts, if the checkpoint has none.

    transformers allocates these matrices, never reads them, and refuses a checkpoint without them. Releases lack them.
    """
    last = _last_expert(keys, "gate")
    if last is None or last != _last_expert(keys, "down"):
        yield
        return
    experts = LONGCAT_FLASH.classes.cls("LongcatFlashExperts")
    stock = experts.__init__

    def smaller(self: Any, config: PretrainedConfig) -> None:
        stock(self, config)
        self.gate_up_proj = nn.Parameter(self.gate_up_proj[: self.num_routed_experts].detach().clone())

    experts.__init__ = smaller
    try:
        yield
    finally:
        experts.__init__ = stock


def _last_expert(keys: Collection[str], part: str) -> int | None:
    found = (re.search(rf"\.mlp\.experts\.(\d+)\.{part}_proj\.weight$", key) for key in keys)
    return max((int(match[1]) for match in found if match), default=None)


LONGCAT_FLASH = Family(
    name="longcat_flash",
    title="LongCat-Flash",
    model_types=("longcat_flash",),
    declaration=Declaration(count="num_nextn_predict_layers", implied=1),
    keys=Keys(
        head_prefixes=("model.mtp.",),
        rules=(
            *end_rules(_LONGCAT, embed_norm="enorm.m", hidden_norm="hnorm.m", final_norm=None),
            KeyRule(native="model.mtp.norm.weight", ours="final_norm.weight"),
            KeyRule(native=f"{_LONGCAT}transformer_layer.mlp.{{rest}}", ours="layer.mlp.{rest}"),
            KeyRule(native=f"{_LONGCAT}{{rest}}", ours="layer.{rest}"),
        ),
        shared=(SharedKey(native="model.mtp.embed_tokens.weight", trunk="{trunk}embed_tokens.weight"),),
    ),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention()}),
    layer=HeadLayer(
        config=_two_for_one,
        borrowed=Borrowed.of("longcat_flash", "LongcatFlash", layer="MLA", build_layer=_attention_then_mlp),
    ),
    trunk=TrunkTraits(loading=_without_idle_gates),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("has no graph for this model")),
)


_MINIMAX = "{trunk}mtp.layers.{module}."
# vLLM's head reads the trunk's state after the final norm and recycles the layer's own output.
_RAW_STATE = Convention(recycle="before_final_norm", zero_first_embedding=True)


def _gate_up_rules(native: str, ours: str) -> tuple[KeyRule, ...]:
    """Return the rules for two matrices of a release that transformers merges into one."""
    merged = f"{ours}gate_up_proj.weight"
    return (
        KeyRule(native=f"{native}gate_proj.weight", ours=merged),
        KeyRule(native=f"{native}up_proj.weight", ours=merged),
    )


def _minimax_rules(layer: str) -> tuple[KeyRule, ...]:
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


def _with_block_indexer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
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
            *end_rules(_MINIMAX),
            *_minimax_rules(f"{_MINIMAX}transformer_layer."),
        ),
        # Only the trunk has layers without experts.
        trunk_rules=(*_gate_up_rules(f"{AFTER_THE_TRUNK}mlp.", "layer.mlp."), *_minimax_rules(AFTER_THE_TRUNK)),
        wrapper_names={
            "vision_tower.layers.": "vision_tower.vision_model.encoder.layers.",
            "multi_modal_projector.merge_linear_": "patch_merge_mlp.linear_",
        },
    ),
    wiring=Wiring(default=_RAW_STATE, conventions={"vllm": _RAW_STATE}),
    layer=HeadLayer(
        config=layers_of(layer_types="minimax_m3_sparse", mlp_layer_types="sparse"),
        borrowed=Borrowed.of("minimax_m3_vl", "MiniMaxM3VL", build_layer=_with_block_indexer, frozen=INDEXER),
    ),
    trunk=TrunkTraits(only_with_vision=True, needs_transformers="5.23"),
    engines=engine_table(
        transformers=HEAD_IGNORED,
        sglang=no("has no MTP for this model"),
        llama_cpp=no("has no graph for this head"),
    ),
)
