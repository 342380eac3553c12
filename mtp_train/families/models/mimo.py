"""Xiaomi MiMo-7B (a Qwen2 trunk) and MiMo-V2-Flash (sliding windows with sinks)."""

from __future__ import annotations

from dataclasses import replace

from mtp_train.families.engines import (
    BEFORE_NORM,
    HEAD_IGNORED,
    LLAMA_CPP_SIDECAR,
    ZERO_FIRST,
    Convention,
    engine_table,
    no,
)
from mtp_train.families.layouts import dense_sliding, end_rules, full
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkClass,
    TrunkTraits,
    Wiring,
)

_MIMO = "model.mtp_layers.{module}."
MIMO = Family(
    name="mimo",
    title="MiMo-7B",
    model_types=("mimo",),
    keys=Keys(
        head_prefixes=("model.mtp_layers.",),
        rules=(
            *end_rules(_MIMO, proj="input_proj", embed_norm="token_layernorm", hidden_norm="hidden_layernorm"),
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
            "sglang": ZERO_FIRST,
        },
    ),
    layer=HeadLayer(config=full, borrowed=Borrowed.of("qwen2", "Qwen2")),
    trunk=TrunkTraits(masks_by_layer_type=True, stand_in=TrunkClass(model_type="qwen2")),
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
    declaration=Declaration(
        # Engines hard-code the number: llama.cpp and SGLang run 3 modules, vLLM runs the first one.
        count=None,
        implied=3,
    ),
    keys=Keys(
        head_prefixes=("model.mtp.",),
        rules=(
            *end_rules(_V2),
            KeyRule(native=f"{_V2}pre_mlp_layernorm.weight", ours="layer.post_attention_layernorm.weight"),
            KeyRule(native=f"{_V2}self_attn.attention_sink_bias", ours="layer.self_attn.sinks"),
            KeyRule(native=f"{_V2}{{rest}}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(
        # The three engines differ in every field; two of them read the state before the norm. Measure acceptance in
        # the engine that serves. vLLM's window, in trunk and head, is one key narrower: it includes the row itself.
        default=BEFORE_NORM,
        conventions={
            "vllm": Convention(modules="first"),
            "sglang": Convention(hidden="before_final_norm", recycle="trunk"),
            "llama.cpp": replace(BEFORE_NORM, prefix="trunk", position_offset=1),
        },
    ),
    layer=HeadLayer(
        config=dense_sliding,
        borrowed=Borrowed.of("mimo_v2_flash", "MiMoV2Flash"),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True),
    # llama.cpp's converter writes separate query, key and value matrices; its graph of the head aborts on these.
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_SIDECAR),
)
