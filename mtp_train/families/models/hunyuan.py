"""Hunyuan 3 and 4: mixtures of experts. Version 4 has several residual streams in its trunk, one in its head."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_POSITIONS, ZERO_FIRST, Convention, engine_table, no
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    INDEXER,
    AttentionThenMlp,
    after_the_trunk,
    end_rules,
    expert_rules,
    sparse,
    sparse_indexed,
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

_V4 = "model.mtp_layers.{module}."


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
            *end_rules(_V4),
            KeyRule(native=f"{_V4}self_attn.learnable_sink_param", ours="layer.self_attn.sinks"),
            _gate(_V4),
            *expert_rules(_V4),
            KeyRule(native=f"{_V4}{{rest}}", ours="layer.{rest}"),
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
