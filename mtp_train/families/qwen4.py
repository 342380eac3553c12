"""Qwen4-Exp: residual streams, embedded n-grams, and attention to chosen pools of keys, in the head too."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.convention import Convention
from mtp_train.families.engines import NO_RECURRENT_ROLLBACK, engine_table, no
from mtp_train.families.key_pools import AveragedPools, choose_pools
from mtp_train.families.layouts import INDEXER, expert_rules, with_layers
from mtp_train.families.spec import Borrowed, CountField, Family, KeyRule, RecurrentKernels
from mtp_train.families.streams import Streams

_LAYER = "mtp.layers.{module}."
# Engines agree: the head reads the streams before they are mixed, and hands on its layer's. Where the config says
# index_share_for_mtp_iteration, they choose keys at depth 1 for all: a matter of texts longer than indexer_budget.
_STREAMS = Convention(hidden="before_final_norm", recycle="before_final_norm")


def _of_the_head(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layer_types=["indexed_attention"] * num_modules, ple_layer_ids=[])


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    layer: nn.Module = borrowed.cls(borrowed.layer)(config, layer_idx)
    choose_pools(layer.get_submodule(INDEXER), AveragedPools)
    return layer


def _choose_pools(decoder: Any) -> None:
    # transformers' own goes through a text query by query.
    for layer in decoder.layers:
        if layer.layer_type == "indexed_attention":
            choose_pools(layer.self_attn.indexer, AveragedPools)


QWEN4_EXP = Family(
    name="qwen4_exp",
    title="Qwen4-Exp",
    model_types=("qwen4_exp_text",),
    count=CountField(name="mtp_num_hidden_layers"),
    head_config_fields=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "full_attention_interval"),
    trunk_prefixes=("model.language_model.", "model."),
    head_prefixes=("mtp.",),
    key_rules=(
        KeyRule(native="mtp.fc_embedding.weight", ours="token_proj.weight"),
        KeyRule(native="mtp.fc_hidden.weight", ours="hidden_proj.weight"),
        KeyRule(native="mtp.pre_fc_norm_embedding.weight", ours="embed_norm.weight"),
        KeyRule(native="mtp.pre_fc_norm_hidden.weight", ours="hidden_norm.weight"),
        KeyRule(native="mtp.hyper_connection_mixer.{rest}", ours="mixer.{rest}"),
        *expert_rules(_LAYER),
        KeyRule(native=f"{_LAYER}{{rest}}", ours="layer.{rest}"),
    ),
    concat="sum",
    final_norm=False,
    default=_STREAMS,
    conventions={"vllm": _STREAMS, "sglang": _STREAMS},
    head_layer_config=_of_the_head,
    borrowed=Borrowed(
        python_module="transformers.models.qwen4_exp.modeling_qwen4_exp",
        layer="Qwen4ExpTextDecoderLayer",
        norm="Qwen4ExpTextRMSNorm",
        rotary="Qwen4ExpTextRotaryEmbedding",
        build_layer=_build_layer,
        frozen=INDEXER,
    ),
    rotary_axes=3,
    masks_by_layer_type=True,
    trunk_final_norm=None,
    streams=Streams(
        count="hc_count",
        mixer="Qwen4ExpTextGatedResidual",
        trunk_mixer="hyper_connection_mixer",
        mixer_options={"use_combine": False},
        joined=True,
    ),
    prepare_trunk=_choose_pools,
    recurrent=RecurrentKernels(
        chunked="torch_chunk_gated_delta_rule",
        single="torch_recurrent_gated_delta_rule",
        conv="causal_conv1d_fn",
        rule="gated_delta",
    ),
    needs_transformers="5.23",
    engines=engine_table(transformers=NO_RECURRENT_ROLLBACK, llama_cpp=no("its converter drops this head")),
)
