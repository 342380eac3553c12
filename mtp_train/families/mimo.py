"""Xiaomi MiMo-7B (a Qwen2 trunk) and MiMo-V2-Flash (sliding windows with sinks)."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.convention import Convention
from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_SIDECAR, engine_table, no
from mtp_train.families.layouts import with_layers
from mtp_train.families.spec import Borrowed, CountField, Family, KeyRule, TrunkClass


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
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=("model.mtp_layers.",),
    key_rules=(
        KeyRule(native=f"{_MIMO}input_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_MIMO}token_layernorm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_MIMO}hidden_layernorm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_MIMO}final_layernorm.weight", ours="final_norm.weight"),
        KeyRule(native=f"{_MIMO}{{rest}}", ours="layer.{rest}"),
    ),
    concat="hidden_first",
    # SGLang's trunk hands over the state after its norm; the head was trained on the one before it, as vLLM reads it.
    default=Convention(hidden="before_final_norm"),
    conventions={
        "vllm": Convention(hidden="before_final_norm", zero_first_embedding=True),
        "sglang": Convention(zero_first_embedding=True),
    },
    head_layer_config=_dense,
    borrowed=Borrowed(
        python_module="transformers.models.qwen2.modeling_qwen2",
        layer="Qwen2DecoderLayer",
        norm="Qwen2RMSNorm",
        rotary="Qwen2RotaryEmbedding",
    ),
    masks_by_layer_type=True,
    trunk_class=TrunkClass(model_type="qwen2"),
    engines=engine_table(
        transformers=no("has no class for MiMo-7B; its own code, with trust_remote_code, ignores the head"),
        llama_cpp=no("has no graph for this head"),
    ),
)

_V2 = "model.mtp.layers.{module}."
MIMO_V2 = Family(
    name="mimo_v2_flash",
    title="MiMo-V2-Flash",
    model_types=("mimo_v2_flash",),
    # Engines know the number: llama.cpp and SGLang run 3 modules, vLLM the first one.
    count=CountField(name=None, implied=3),
    head_config_fields=(),
    trunk_prefixes=("model.",),
    head_prefixes=("model.mtp.",),
    key_rules=(
        KeyRule(native=f"{_V2}eh_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_V2}enorm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_V2}hnorm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_V2}final_layernorm.weight", ours="final_norm.weight"),
        KeyRule(native=f"{_V2}pre_mlp_layernorm.weight", ours="layer.post_attention_layernorm.weight"),
        KeyRule(native=f"{_V2}self_attn.attention_sink_bias", ours="layer.self_attn.sinks"),
        KeyRule(native=f"{_V2}{{rest}}", ours="layer.{rest}"),
    ),
    # Engines disagree on everything; two of three read the state before the norm. Measure before you serve.
    # vLLM's window is also one narrower than the others', in trunk and head: it counts the row itself.
    default=Convention(hidden="before_final_norm", recycle="before_final_norm"),
    conventions={
        "vllm": Convention(modules="first"),
        "sglang": Convention(hidden="before_final_norm", recycle="trunk"),
        "llama.cpp": Convention(
            hidden="before_final_norm", recycle="before_final_norm", prefix="trunk", position_offset=1
        ),
    },
    head_layer_config=_dense_sliding,
    borrowed=Borrowed(
        python_module="transformers.models.mimo_v2_flash.modeling_mimo_v2_flash",
        layer="MiMoV2FlashDecoderLayer",
        norm="MiMoV2FlashRMSNorm",
        rotary="MiMoV2FlashRotaryEmbedding",
    ),
    rotary_by_layer_type=True,
    masks_by_layer_type=True,
    # llama.cpp's converter leaves queries, keys and values apart, with which its graph of the head aborts.
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_SIDECAR),
)
