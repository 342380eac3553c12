"""Step-3.5 and 3.7: three chained modules after the trunk's layers, each with its own lm_head."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from mtp_train.families.engines import BEFORE_NORM, engine_table, no
from mtp_train.families.layouts import AFTER_THE_TRUNK, after_the_trunk, with_layers
from mtp_train.families.spec import Borrowed, Family, HeadLayer, KeyRule, TrunkTraits, Wiring

_MOE = f"{AFTER_THE_TRUNK}moe."


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
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
        KeyRule(native=f"{_MOE}gate.weight", ours="layer.mlp.gate.weight"),
        KeyRule(native=f"{_MOE}router_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{_MOE}gate_proj.weight", ours="layer.mlp.experts.gate_up_proj", stack="concat", order=0),
        KeyRule(native=f"{_MOE}up_proj.weight", ours="layer.mlp.experts.gate_up_proj", stack="concat", order=1),
        KeyRule(native=f"{_MOE}down_proj.weight", ours="layer.mlp.experts.down_proj"),
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
    layer=HeadLayer(config=_head_layer_config, borrowed=Borrowed.of("step3p7", "Step3p7"), rotary_by_layer_type=True),
    trunk=TrunkTraits(only_with_vision=True, masks_by_layer_type=True),
    engines=engine_table(
        transformers=no("generate(use_mtp=True) reads and recycles other states and the trunk's lm_head")
    ),
)
