"""Heads that are layers after the trunk's last: Hunyuan 3 and 4, Ling 3, Step-3.5 and 3.7, dots3-note.

Hunyuan 4 has several residual streams in its trunk and one in its head, Step three chained modules with an lm_head
each, dots3-note a head with a window and an embedding of its own.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import (
    BEFORE_NORM,
    HEAD_IGNORED,
    LLAMA_CPP_KEEPS,
    LLAMA_CPP_POSITIONS,
    USE_MTP,
    ZERO_FIRST,
    Convention,
    engine_table,
    no,
)
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    INDEXER,
    KIMI_DELTA,
    REPEATED_AFTER_THE_TRUNK,
    WRAPPED,
    AttentionThenMlp,
    after_the_trunk,
    dense_sliding,
    end_rules,
    expert_rules,
    sparse,
    sparse_full,
    sparse_indexed,
    with_layers,
)
from mtp_train.families.spec import Borrowed, Declaration, Family, HeadLayer, KeyRule, Keys, TrunkTraits, Wiring


def _without_streams(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    return AttentionThenMlp(
        borrowed.cls("HYV4Attention")(config, layer_idx),
        borrowed.cls("HYV4MoE")(config),
        (borrowed.make_norm(config), borrowed.make_norm(config)),
    )


HY_V3 = Family(
    name="hy_v3",
    title="Hunyuan 3",
    model_types=("hy_v3",),
    keys=after_the_trunk(
        *expert_rules(AFTER_THE_TRUNK),
        KeyRule(native=f"{AFTER_THE_TRUNK}mlp.router.gate.weight", ours="layer.mlp.gate.weight"),
        KeyRule(native=f"{AFTER_THE_TRUNK}mlp.expert_bias", ours="layer.mlp.e_score_correction_bias"),
        KeyRule(native=f"{AFTER_THE_TRUNK}mlp.shared_mlp.{{rest}}", ours="layer.mlp.shared_experts.{rest}"),
        final_norm="final_layernorm",
    ),
    wiring=Wiring(conventions={"vllm": ZERO_FIRST, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(config=sparse, borrowed=Borrowed.of("hy_v3", "HYV3")),
    engines=engine_table(transformers=HEAD_IGNORED),
)

_V4_LAYER = "model.mtp_layers.{module}."


def _gate(layer: str) -> KeyRule:
    return KeyRule(native=f"{layer}self_attn.linear_gate.{{rest}}", ours="layer.self_attn.gate_proj.{rest}")


HY_V4 = Family(
    name="hy_v4",
    title="Hunyuan 4",
    model_types=("hy_v4",),
    declaration=Declaration(count="num_nextn_predict_layers", others=("mtp_quant_algo",)),
    keys=Keys(
        head_prefixes=("model.mtp_layers.",),
        rules=(
            *end_rules(_V4_LAYER),
            KeyRule(native=f"{_V4_LAYER}self_attn.learnable_sink_param", ours="layer.self_attn.sinks"),
            _gate(_V4_LAYER),
            *expert_rules(_V4_LAYER),
            KeyRule(native=f"{_V4_LAYER}{{rest}}", ours="layer.{rest}"),
        ),
        trunk_rules=(_gate(AFTER_THE_TRUNK),),
    ),
    wiring=Wiring(conventions={"vllm": ZERO_FIRST, "sglang": Convention()}),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed.of("hy_v4", "HYV4", build_layer=_without_streams, frozen=INDEXER),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("its converter drops this head")),
)

_LING_ATTENTION = f"{AFTER_THE_TRUNK}attention."
BAILING_HYBRID = Family(
    name="bailing_hybrid",
    title="Ling 3 (Bailing hybrid)",
    model_types=("bailing_hybrid",),
    keys=after_the_trunk(
        *expert_rules(AFTER_THE_TRUNK),
        KeyRule(native=f"{AFTER_THE_TRUNK}mlp.gate.expert_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{_LING_ATTENTION}dense.{{rest}}", ours="layer.self_attn.o_proj.{rest}"),
        KeyRule(native=f"{_LING_ATTENTION}{{rest}}", ours="layer.self_attn.{rest}"),
        final_norm="final_layernorm",
        embed="{trunk}word_embeddings.weight",
        trunk_rules=(KeyRule(native=f"{_LING_ATTENTION}{{rest}}", ours="layer.self_attn.forget_gate.{rest}"),),
    ),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(config=sparse_full, borrowed=Borrowed.of("bailing_hybrid", "BailingHybrid")),
    trunk=TrunkTraits(masks_by_layer_type=True, recurrent=KIMI_DELTA, needs_transformers="5.23"),
    engines=engine_table(transformers=USE_MTP),
)

_STEP_MOE = f"{AFTER_THE_TRUNK}moe."


def _step_layers(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    layer_types = list(text_config.mtp_layer_types or ["full_attention"] * num_modules)[:num_modules]
    sliding = {"num_attention_heads": text_config.num_sliding_attention_heads}
    return with_layers(
        text_config,
        num_modules,
        layer_types=layer_types,
        mlp_layer_types=list(text_config.mtp_mlp_layer_types or ["dense"] * num_modules)[:num_modules],
        per_layer_config={index: sliding for index, kind in enumerate(layer_types) if kind == "sliding_attention"},
        # These lists cover the trunk's layers only.
        swiglu_limits=None,
        swiglu_limits_shared=None,
    )


STEP3P7 = Family(
    name="step3p7",
    title="Step-3.5 / 3.7",
    model_types=("step3p5",),
    keys=after_the_trunk(
        KeyRule(native=f"{AFTER_THE_TRUNK}transformer.shared_head.output.weight", ours="lm_head.weight"),
        KeyRule(native=f"{_STEP_MOE}gate.weight", ours="layer.mlp.gate.weight"),
        KeyRule(native=f"{_STEP_MOE}router_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{_STEP_MOE}gate_proj.weight", ours="layer.mlp.experts.gate_up_proj"),
        KeyRule(native=f"{_STEP_MOE}up_proj.weight", ours="layer.mlp.experts.gate_up_proj"),
        KeyRule(native=f"{_STEP_MOE}down_proj.weight", ours="layer.mlp.experts.down_proj"),
        KeyRule(native=f"{AFTER_THE_TRUNK}share_expert.{{rest}}", ours="layer.mlp.shared_experts.{rest}"),
        final_norm="transformer.shared_head.norm",
    ),
    wiring=Wiring(
        own_lm_head=True,
        default=BEFORE_NORM,
        conventions={
            "vllm": BEFORE_NORM,
            "sglang": BEFORE_NORM,
            "llama.cpp": replace(BEFORE_NORM, prefix="trunk", position_offset=1),
        },
    ),
    layer=HeadLayer(config=_step_layers, borrowed=Borrowed.of("step3p7", "Step3p7")),
    trunk=TrunkTraits(only_with_vision=True, masks_by_layer_type=True),
    engines=engine_table(
        transformers=no("generate(use_mtp=True) reads and recycles other states and the trunk's lm_head")
    ),
)

_DOTS_KEYS = after_the_trunk(trunk_prefixes=WRAPPED, shared=REPEATED_AFTER_THE_TRUNK[1:])
DOTS3_NOTE = Family(
    name="dots3_note",
    title="dots3-note",
    # In releases the text model's fields are at the top level of the config, beside the other parts.
    model_types=("dots3_note_text", "dots3_note"),
    declaration=Declaration(
        # Engines assume 1 if the config lacks the field.
        count="num_nextn_predict_layers",
        implied=1,
        others=("mtp_layer_types",),
    ),
    keys=replace(
        _DOTS_KEYS,
        head_prefixes=(*_DOTS_KEYS.head_prefixes, "{trunk}mtp."),
        rules=(KeyRule(native="{trunk}mtp.embed_tokens.weight", ours="embedding.weight"), *_DOTS_KEYS.rules),
    ),
    wiring=Wiring(own_embedding=True, conventions={"vllm": ZERO_FIRST, "sglang": Convention()}),
    layer=HeadLayer(
        config=lambda config, num_modules: dense_sliding(config.per_layer_config["sliding_attention"], num_modules),
        borrowed=Borrowed.of("dots3_note", "Dots3Note", layer="TextDecoderLayer", rotary="TextRotaryEmbedding"),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)
