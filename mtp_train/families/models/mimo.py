"""Xiaomi MiMo-7B (a Qwen2 trunk) and MiMo-V2-Flash (sliding windows with sinks)."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.convention import Convention
from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_SIDECAR, engine_table, no
from mtp_train.families.layouts import with_layers
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkClass,
    TrunkTraits,
    Wiring,
)


def _dense(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layer_types=["full_attention"] * num_modules)


def _dense_sliding(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(
        text_config,
        num_modules,
        layer_types=["sliding_attention"] * num_modules,
        mlp_layer_types=["dense"] * num_modules,
    )


_MIMO = "model.mtp_layers.{module}."
MIMO = Family(
    name="mimo",
    title="MiMo-7B",
    model_types=("mimo",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(
        head_prefixes=("model.mtp_layers.",),
        rules=(
            KeyRule(native=f"{_MIMO}input_proj.weight", ours="proj.weight"),
            KeyRule(native=f"{_MIMO}token_layernorm.weight", ours="embed_norm.weight"),
            KeyRule(native=f"{_MIMO}hidden_layernorm.weight", ours="hidden_norm.weight"),
            KeyRule(native=f"{_MIMO}final_layernorm.weight", ours="final_norm.weight"),
            KeyRule(native=f"{_MIMO}{{rest}}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(
        concat="hidden_first",
        # SGLang's trunk returns the state after its final norm. The head was trained on the state before it, which
        # vLLM reads.
        default=Convention(hidden="before_final_norm"),
        conventions={
            "vllm": Convention(hidden="before_final_norm", zero_first_embedding=True),
            "sglang": Convention(zero_first_embedding=True),
        },
    ),
    layer=HeadLayer(
        config=_dense,
        borrowed=Borrowed(
            python_module="transformers.models.qwen2.modeling_qwen2",
            layer="Qwen2DecoderLayer",
            norm="Qwen2RMSNorm",
            rotary="Qwen2RotaryEmbedding",
        ),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, stand_in=TrunkClass(model_type="qwen2")),
    engines=Engines(
        support=engine_table(
            transformers=no("has no class for MiMo-7B; its own code, with trust_remote_code, ignores the head"),
            llama_cpp=no("has no graph for this head"),
        ),
    ),
)

_V2 = "model.mtp.layers.{module}."
MIMO_V2 = Family(
    name="mimo_v2_flash",
    title="MiMo-V2-Flash",
    model_types=("mimo_v2_flash",),
    declaration=Declaration(
        # Engines hard-code the number: llama.cpp and SGLang run 3 modules, vLLM runs the first one.
        count=None,
        implied=3,
    ),
    keys=Keys(
        head_prefixes=("model.mtp.",),
        rules=(
            KeyRule(native=f"{_V2}eh_proj.weight", ours="proj.weight"),
            KeyRule(native=f"{_V2}enorm.weight", ours="embed_norm.weight"),
            KeyRule(native=f"{_V2}hnorm.weight", ours="hidden_norm.weight"),
            KeyRule(native=f"{_V2}final_layernorm.weight", ours="final_norm.weight"),
            KeyRule(native=f"{_V2}pre_mlp_layernorm.weight", ours="layer.post_attention_layernorm.weight"),
            KeyRule(native=f"{_V2}self_attn.attention_sink_bias", ours="layer.self_attn.sinks"),
            KeyRule(native=f"{_V2}{{rest}}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(
        # The three engines differ in every field; two of them read the state before the norm. Measure acceptance in
        # the engine that serves. vLLM's window, in trunk and head, is one key narrower: it includes the row itself.
        default=Convention(hidden="before_final_norm", recycle="before_final_norm"),
        conventions={
            "vllm": Convention(modules="first"),
            "sglang": Convention(hidden="before_final_norm", recycle="trunk"),
            "llama.cpp": Convention(
                hidden="before_final_norm", recycle="before_final_norm", prefix="trunk", position_offset=1
            ),
        },
    ),
    layer=HeadLayer(
        config=_dense_sliding,
        borrowed=Borrowed(
            python_module="transformers.models.mimo_v2_flash.modeling_mimo_v2_flash",
            layer="MiMoV2FlashDecoderLayer",
            norm="MiMoV2FlashRMSNorm",
            rotary="MiMoV2FlashRotaryEmbedding",
        ),
        rotary_by_layer_type=True,
    ),
    trunk=TrunkTraits(masks_by_layer_type=True),
    engines=Engines(
        # llama.cpp's converter writes separate query, key and value matrices; its graph of the head aborts on these.
        support=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_SIDECAR),
    ),
)
