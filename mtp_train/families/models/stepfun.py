"""Step-3.5 and 3.7: three chained modules after the trunk's layers, each with its own lm_head."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.convention import Convention
from mtp_train.families.engines import engine_table, no
from mtp_train.families.layouts import AFTER_THE_TRUNK, after_the_trunk, with_layers
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

_BEFORE_NORM = Convention(hidden="before_final_norm", recycle="before_final_norm")
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
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(
        head_prefixes=(AFTER_THE_TRUNK,),
        rules=after_the_trunk(
            KeyRule(native=f"{AFTER_THE_TRUNK}transformer.shared_head.output.weight", ours="lm_head.weight"),
            KeyRule(native=f"{_MOE}gate.weight", ours="layer.mlp.gate.weight"),
            KeyRule(native=f"{_MOE}router_bias", ours="layer.mlp.gate.e_score_correction_bias"),
            KeyRule(native=f"{_MOE}gate_proj.weight", ours="layer.mlp.experts.gate_up_proj", stack="concat", order=0),
            KeyRule(native=f"{_MOE}up_proj.weight", ours="layer.mlp.experts.gate_up_proj", stack="concat", order=1),
            KeyRule(native=f"{_MOE}down_proj.weight", ours="layer.mlp.experts.down_proj"),
            KeyRule(native=f"{AFTER_THE_TRUNK}share_expert.{{rest}}", ours="layer.mlp.shared_experts.{rest}"),
            final_norm="transformer.shared_head.norm",
        ),
    ),
    wiring=Wiring(
        own_lm_head=True,
        default=_BEFORE_NORM,
        conventions={
            "vllm": _BEFORE_NORM,
            "sglang": _BEFORE_NORM,
            "llama.cpp": Convention(
                hidden="before_final_norm", recycle="before_final_norm", prefix="trunk", position_offset=1
            ),
        },
    ),
    layer=HeadLayer(
        config=_head_layer_config,
        borrowed=Borrowed(
            python_module="transformers.models.step3p7.modeling_step3p7",
            layer="Step3p7DecoderLayer",
            norm="Step3p7RMSNorm",
            rotary="Step3p7RotaryEmbedding",
        ),
        rotary_by_layer_type=True,
    ),
    trunk=TrunkTraits(only_with_vision=True, masks_by_layer_type=True),
    engines=Engines(
        support=engine_table(
            transformers=no("generate(use_mtp=True) reads and recycles other states and the trunk's lm_head")
        ),
    ),
)
