"""Qwen3.5, Qwen3.6 and Qwen3-Next: hybrid Gated DeltaNet trunks, one full-attention head module under ``mtp.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import NO_RECURRENT_ROLLBACK, engine_table, no
from mtp_train.families.layouts import INDEXER, beside_the_trunk, expert_rules, with_layers
from mtp_train.families.mechanisms.key_pools import AveragedPools, choose_pools
from mtp_train.families.mechanisms.residual_streams import Streams
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    RecurrentKernels,
    TrunkTraits,
    Wiring,
)

# All three engines: the head reads the state after the trunk's final norm and recycles the state after its own.
_CONVENTIONS: Mapping[str, Convention] = {
    "vllm": Convention(),
    "sglang": Convention(),
    "llama.cpp": LLAMA_CPP_POSITIONS,
}
# A field of the trunk and the head, without which SGLang does not start. transformers' save_pretrained replaces it by
# layer_types, so a graft restores it from the base.
_INTERVAL = "full_attention_interval"
_KERNELS = RecurrentKernels(
    chunked="torch_chunk_gated_delta_rule",
    single="torch_recurrent_gated_delta_rule",
    conv="causal_conv1d_fn",
    rule="gated_delta",
)


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layer_types=["full_attention"] * num_modules)


def _head_layer_config_next(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # The head's layer is a mixture of experts even if the trunk's first layers are dense.
    return with_layers(
        text_config,
        num_modules,
        layer_types=["full_attention"] * num_modules,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )


QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5 / 3.6 / 3.8 dense",
    model_types=("qwen3_5_text",),
    declaration=Declaration(count="mtp_num_hidden_layers", others=("mtp_use_dedicated_embeddings", _INTERVAL)),
    keys=Keys(trunk_prefixes=("model.language_model.", "model."), head_prefixes=("mtp.",), rules=beside_the_trunk()),
    wiring=Wiring(conventions=_CONVENTIONS),
    layer=HeadLayer(
        config=_head_layer_config,
        borrowed=Borrowed(
            python_module="transformers.models.qwen3_5.modeling_qwen3_5",
            layer="Qwen3_5DecoderLayer",
            norm="Qwen3_5RMSNorm",
            rotary="Qwen3_5TextRotaryEmbedding",
        ),
        rotary_axes=3,
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, recurrent=_KERNELS),
    engines=Engines(support=engine_table(transformers=NO_RECURRENT_ROLLBACK)),
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    title="Qwen3.5 / 3.6 / 3.8 MoE",
    model_types=("qwen3_5_moe_text",),
    declaration=Declaration(count="mtp_num_hidden_layers", others=("mtp_use_dedicated_embeddings", _INTERVAL)),
    keys=Keys(
        trunk_prefixes=("model.language_model.", "model."),
        head_prefixes=("mtp.",),
        rules=beside_the_trunk(*expert_rules("mtp.layers.{module}.")),
    ),
    wiring=Wiring(conventions=_CONVENTIONS),
    layer=HeadLayer(
        config=_head_layer_config,
        borrowed=Borrowed(
            python_module="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
            layer="Qwen3_5MoeDecoderLayer",
            norm="Qwen3_5MoeRMSNorm",
            rotary="Qwen3_5MoeTextRotaryEmbedding",
        ),
        rotary_axes=3,
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, recurrent=_KERNELS),
    engines=Engines(support=engine_table(transformers=NO_RECURRENT_ROLLBACK)),
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    declaration=Declaration(
        # Releases lack the field. SGLang and llama.cpp assume 1; vLLM takes the depth from its command line.
        count="num_nextn_predict_layers",
        implied=1,
        others=(_INTERVAL,),
    ),
    keys=Keys(head_prefixes=("mtp.",), rules=beside_the_trunk(*expert_rules("mtp.layers.{module}."))),
    wiring=Wiring(conventions=_CONVENTIONS),
    layer=HeadLayer(
        config=_head_layer_config_next,
        borrowed=Borrowed(
            python_module="transformers.models.qwen3_next.modeling_qwen3_next",
            layer="Qwen3NextDecoderLayer",
            norm="Qwen3NextRMSNorm",
            rotary="Qwen3NextRotaryEmbedding",
        ),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, recurrent=_KERNELS),
    engines=Engines(support=engine_table(transformers=NO_RECURRENT_ROLLBACK)),
)

_LAYER = "mtp.layers.{module}."
# In all engines the head reads the streams before they are mixed, and recycles the streams of its layer. With
# index_share_for_mtp_iteration in the config, engines select keys at depth 1 and reuse them at all depths. The result
# differs only in texts longer than indexer_budget.
_STREAMS = Convention(hidden="before_final_norm", recycle="before_final_norm")


def _of_the_head(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layer_types=["indexed_attention"] * num_modules, ple_layer_ids=[])


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: nn.Module = borrowed.cls(borrowed.layer)(config, layer_idx)
    choose_pools(layer.get_submodule(INDEXER), AveragedPools)
    return layer


def _choose_pools(decoder: Any) -> None:
    # transformers' own indexer loops over the queries of a text.
    for layer in decoder.layers:
        if layer.layer_type == "indexed_attention":
            choose_pools(layer.self_attn.indexer, AveragedPools)


QWEN4_EXP = Family(
    name="qwen4_exp",
    title="Qwen4-Exp (Qwen3.8 Flash-Next)",
    model_types=("qwen4_exp_text",),
    declaration=Declaration(
        count="mtp_num_hidden_layers", others=("mtp_use_dedicated_embeddings", "full_attention_interval")
    ),
    keys=Keys(
        trunk_prefixes=("model.language_model.", "model."),
        head_prefixes=("mtp.",),
        rules=(
            KeyRule(native="mtp.fc_embedding.weight", ours="token_proj.weight"),
            KeyRule(native="mtp.fc_hidden.weight", ours="hidden_proj.weight"),
            KeyRule(native="mtp.pre_fc_norm_embedding.weight", ours="embed_norm.weight"),
            KeyRule(native="mtp.pre_fc_norm_hidden.weight", ours="hidden_norm.weight"),
            KeyRule(native="mtp.hyper_connection_mixer.{rest}", ours="mixer.{rest}"),
            *expert_rules(_LAYER),
            KeyRule(native=f"{_LAYER}{{rest}}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(concat="sum", final_norm=False, default=_STREAMS, conventions={"vllm": _STREAMS, "sglang": _STREAMS}),
    layer=HeadLayer(
        config=_of_the_head,
        borrowed=Borrowed(
            python_module="transformers.models.qwen4_exp.modeling_qwen4_exp",
            layer="Qwen4ExpTextDecoderLayer",
            norm="Qwen4ExpTextRMSNorm",
            rotary="Qwen4ExpTextRotaryEmbedding",
            build_layer=_build_layer,
            frozen=INDEXER,
        ),
        rotary_axes=3,
    ),
    trunk=TrunkTraits(
        masks_by_layer_type=True,
        final_norm=None,
        streams=Streams(
            count="hc_count",
            mixer="Qwen4ExpTextGatedResidual",
            trunk_mixer="hyper_connection_mixer",
            mixer_options={"use_combine": False},
            joined=True,
        ),
        prepare=_choose_pools,
        recurrent=RecurrentKernels(
            chunked="torch_chunk_gated_delta_rule",
            single="torch_recurrent_gated_delta_rule",
            conv="causal_conv1d_fn",
            rule="gated_delta",
        ),
        needs_transformers="5.23",
    ),
    engines=Engines(
        support=engine_table(transformers=NO_RECURRENT_ROLLBACK, llama_cpp=no("its converter drops this head")),
    ),
)
