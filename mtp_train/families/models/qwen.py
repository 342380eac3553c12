"""Qwen3.5, Qwen3.6 and Qwen3-Next: hybrid Gated DeltaNet trunks, one full-attention head module under ``mtp.``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtp_train.families import layouts
from mtp_train.families.engines import ALIKE, BEFORE_NORM, NO_RECURRENT_ROLLBACK, no
from mtp_train.families.layouts import BESIDE_THE_TRUNK, INDEXER, WRAPPED
from mtp_train.families.mechanisms.key_pools import AveragedPools, choose_pools
from mtp_train.families.spec import (
    Declaration,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    RecurrentKernels,
    Streams,
    TrunkTraits,
    Wiring,
)

# A field of the trunk and the head, without which SGLang does not start. transformers' save_pretrained replaces it by
# layer_types, so a graft restores it from the base.
_INTERVAL = "full_attention_interval"
_DECLARATION = Declaration(count="mtp_num_hidden_layers", others=("mtp_use_dedicated_embeddings", _INTERVAL))
_KERNELS = RecurrentKernels(
    chunked="torch_chunk_gated_delta_rule",
    single="torch_recurrent_gated_delta_rule",
    rule="gated_delta",
)
# All three engines: the head reads the state after the trunk's final norm and recycles the state after its own.
_WIRING = Wiring(conventions=ALIKE)
_TRUNK = TrunkTraits(recurrent=_KERNELS)

QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5 / 3.6 / 3.8 dense",
    model_types=("qwen3_5_text",),
    declaration=_DECLARATION,
    keys=layouts.beside_the_trunk(trunk_prefixes=WRAPPED),
    wiring=_WIRING,
    layer=HeadLayer("qwen3_5", "Qwen3_5", config=layouts.full, rotary="TextRotaryEmbedding", rotary_axes=3),
    trunk=_TRUNK,
    engines={"transformers": NO_RECURRENT_ROLLBACK},
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    title="Qwen3.5 / 3.6 / 3.8 MoE",
    model_types=("qwen3_5_moe_text",),
    keys=layouts.beside_the_trunk(*layouts.expert_rules(BESIDE_THE_TRUNK), trunk_prefixes=WRAPPED),
    layer=HeadLayer("qwen3_5_moe", "Qwen3_5Moe", config=layouts.full, rotary="TextRotaryEmbedding", rotary_axes=3),
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    declaration=Declaration(
        # Releases lack the field. SGLang and llama.cpp assume 1; vLLM takes the depth from its command line.
        implied=1,
        others=(_INTERVAL,),
    ),
    keys=layouts.beside_the_trunk(*layouts.expert_rules(BESIDE_THE_TRUNK)),
    wiring=_WIRING,
    # A mixture of experts even if the trunk's first layers are dense.
    layer=HeadLayer("qwen3_next", "Qwen3Next", config=layouts.every_layer_sparse),
    trunk=_TRUNK,
    engines={"transformers": NO_RECURRENT_ROLLBACK},
)

# In all engines the head reads the streams before they are mixed, and recycles the streams of its layer. With
# index_share_for_mtp_iteration in the config, engines select keys at depth 1 and reuse them at all depths. The result
# differs only in texts longer than indexer_budget.
_STREAMS = Wiring(
    concat="sum", final_norm=False, default=BEFORE_NORM, conventions={"vllm": BEFORE_NORM, "sglang": BEFORE_NORM}
)


def _choose_pools(decoder: Any) -> None:
    # transformers' own indexer loops over the queries of a text.
    for layer in decoder.layers:
        if layer.layer_type == "indexed_attention":
            choose_pools(layer.self_attn.indexer, AveragedPools)


_ENDS = {
    "fc_embedding": "token_proj",
    "fc_hidden": "hidden_proj",
    "pre_fc_norm_embedding": "embed_norm",
    "pre_fc_norm_hidden": "hidden_norm",
}
QWEN4_EXP = Family(
    name="qwen4_exp",
    title="Qwen4-Exp (Qwen3.8 Flash-Next)",
    model_types=("qwen4_exp_text",),
    declaration=_DECLARATION,
    keys=Keys(
        trunk_prefixes=WRAPPED,
        head_prefixes=("mtp.",),
        rules=(
            *layouts.weight_rules("mtp.", _ENDS),
            KeyRule(native="mtp.hyper_connection_mixer.{rest}", ours="mixer.{rest}"),
            *layouts.expert_rules(BESIDE_THE_TRUNK),
            KeyRule(native=f"{BESIDE_THE_TRUNK}{{rest}}", ours="layer.{rest}"),
        ),
    ),
    wiring=_STREAMS,
    layer=HeadLayer(
        "qwen4_exp",
        "Qwen4ExpText",
        config=layouts.layers_of(layer_types="indexed_attention", ple_layer_ids=[]),
        prepare=lambda layer: choose_pools(layer.self_attn.indexer, AveragedPools),
        frozen=INDEXER,
        rotary_axes=3,
    ),
    trunk=TrunkTraits(
        final_norm=None,
        streams=Streams(
            count="hc_count",
            mixer="Qwen4ExpTextGatedResidual",
            trunk_mixer="hyper_connection_mixer",
            mixer_options={"use_combine": False},
            joined=True,
        ),
        prepare=_choose_pools,
        recurrent=_KERNELS,
        needs_transformers="5.23",
    ),
    engines={"transformers": NO_RECURRENT_ROLLBACK, "llama.cpp": no("its converter drops this head")},
)

FAMILIES = (QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, QWEN4_EXP)
