"""Hunyuan 3 and 4: mixtures of experts. Version 4 has several residual streams in its trunk, one in its head."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.blocks import AttentionThenMlp
from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import HEAD_IGNORED, engine_table, no
from mtp_train.families.layouts import AFTER_THE_TRUNK, INDEXER, after_the_trunk, expert_rules, sparse, sparse_indexed
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkTraits,
    Wiring,
)


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
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(
        head_prefixes=(AFTER_THE_TRUNK,),
        rules=after_the_trunk(
            *expert_rules(AFTER_THE_TRUNK),
            KeyRule(native=f"{AFTER_THE_TRUNK}mlp.router.gate.weight", ours="layer.mlp.gate.weight"),
            KeyRule(native=f"{AFTER_THE_TRUNK}mlp.expert_bias", ours="layer.mlp.e_score_correction_bias"),
            KeyRule(native=f"{AFTER_THE_TRUNK}mlp.shared_mlp.{{rest}}", ours="layer.mlp.shared_experts.{rest}"),
            final_norm="final_layernorm",
        ),
    ),
    wiring=Wiring(
        conventions={
            "vllm": Convention(zero_first_embedding=True),
            "sglang": Convention(),
            "llama.cpp": LLAMA_CPP_POSITIONS,
        },
    ),
    layer=HeadLayer(
        config=sparse,
        borrowed=Borrowed(
            python_module="transformers.models.hy_v3.modeling_hy_v3",
            layer="HYV3DecoderLayer",
            norm="HYV3RMSNorm",
            rotary="HYV3RotaryEmbedding",
        ),
    ),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED)),
)

_V4 = "model.mtp_layers.{module}."
HY_V4 = Family(
    name="hy_v4",
    title="Hunyuan 4",
    model_types=("hy_v4",),
    declaration=Declaration(count="num_nextn_predict_layers", others=("mtp_quant_algo",)),
    keys=Keys(
        head_prefixes=("model.mtp_layers.",),
        rules=(
            KeyRule(native=f"{_V4}eh_proj.weight", ours="proj.weight"),
            KeyRule(native=f"{_V4}enorm.weight", ours="embed_norm.weight"),
            KeyRule(native=f"{_V4}hnorm.weight", ours="hidden_norm.weight"),
            KeyRule(native=f"{_V4}final_layernorm.weight", ours="final_norm.weight"),
            KeyRule(native=f"{_V4}self_attn.learnable_sink_param", ours="layer.self_attn.sinks"),
            KeyRule(native=f"{_V4}self_attn.linear_gate.{{rest}}", ours="layer.self_attn.gate_proj.{rest}"),
            *expert_rules(_V4),
            KeyRule(native=f"{_V4}{{rest}}", ours="layer.{rest}"),
        ),
        trunk_rules=(
            KeyRule(
                native="{trunk}layers.{layer}.self_attn.linear_gate.{rest}", ours="layer.self_attn.gate_proj.{rest}"
            ),
        ),
    ),
    wiring=Wiring(conventions={"vllm": Convention(zero_first_embedding=True), "sglang": Convention()}),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed(
            python_module="transformers.models.hy_v4.modeling_hy_v4",
            layer="HYV4DecoderLayer",
            norm="HYV4RMSNorm",
            rotary="HYV4RotaryEmbedding",
            build_layer=_without_streams,
            frozen=INDEXER,
        ),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("its converter drops this head"))),
)
