"""Qwen3.5 and Qwen3.6, dense: hybrid Gated DeltaNet trunk, one full-attention head module under ``mtp.``."""

from __future__ import annotations

import copy

from transformers import PretrainedConfig

from mtp_train.families.engines import NO_RECURRENT_ROLLBACK, engine_table
from mtp_train.families.spec import Borrowed, Convention, Family, KeyRule, RecurrentKernels

# All three engines agree: the hidden state after the trunk's final norm, and the head's own final norm recycled.
_POST_NORM = Convention(recycle="after_final_norm", zero_first_embedding=False)


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    config = copy.deepcopy(text_config)
    config.layer_types = ["full_attention"] * num_modules
    config.num_hidden_layers = num_modules
    return config


QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5 / Qwen3.6 dense",
    model_types=("qwen3_5_text",),
    count_field="mtp_num_hidden_layers",
    head_config_fields=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    trunk_prefixes=("model.language_model.", "model."),
    head_prefixes=("mtp.",),
    key_rules=(
        KeyRule(native="mtp.fc.weight", ours="proj.weight"),
        KeyRule(native="mtp.pre_fc_norm_embedding.weight", ours="embed_norm.weight"),
        KeyRule(native="mtp.pre_fc_norm_hidden.weight", ours="hidden_norm.weight"),
        KeyRule(native="mtp.norm.weight", ours="final_norm.weight"),
        KeyRule(native="mtp.layers.{module}.{rest}", ours="layer.{rest}"),
    ),
    default=_POST_NORM,
    conventions={"vllm": _POST_NORM, "sglang": _POST_NORM, "llama.cpp": _POST_NORM},
    head_layer_config=_head_layer_config,
    borrowed=Borrowed(
        python_module="transformers.models.qwen3_5.modeling_qwen3_5",
        layer="Qwen3_5DecoderLayer",
        norm="Qwen3_5RMSNorm",
        rotary="Qwen3_5TextRotaryEmbedding",
    ),
    rotary_axes=3,
    masks_by_layer_type=True,
    recurrent=RecurrentKernels(
        chunked="torch_chunk_gated_delta_rule",
        single="torch_recurrent_gated_delta_rule",
        conv="causal_conv1d_fn",
        rule="gated_delta",
    ),
    engines=engine_table(transformers=NO_RECURRENT_ROLLBACK),
)
