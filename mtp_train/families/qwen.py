"""Qwen3.5, Qwen3.6 and Qwen3-Next: hybrid Gated DeltaNet trunks, one full-attention head module under ``mtp.``."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import NO_RECURRENT_ROLLBACK, engine_table
from mtp_train.families.layouts import beside_the_trunk, expert_rules, with_layers
from mtp_train.families.spec import Borrowed, CountField, Engine, Family, RecurrentKernels

# All three engines agree: the hidden state after the trunk's final norm, and the head's own final norm recycled.
_CONVENTIONS: Mapping[Engine, Convention] = {
    "vllm": Convention(),
    "sglang": Convention(),
    "llama.cpp": LLAMA_CPP_POSITIONS,
}
# Of trunk and head: SGLang starts with no config that lacks it. transformers writes layer_types in its place where a
# release has this alone, so that a fine-tune saved by it has it from the base again.
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
    # The head's layer is a mixture of experts whatever the trunk's first layers are.
    return with_layers(
        text_config,
        num_modules,
        layer_types=["full_attention"] * num_modules,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )


QWEN3_5 = Family(
    name="qwen3_5",
    title="Qwen3.5 / Qwen3.6 dense",
    model_types=("qwen3_5_text",),
    count=CountField(name="mtp_num_hidden_layers"),
    head_config_fields=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", _INTERVAL),
    trunk_prefixes=("model.language_model.", "model."),
    head_prefixes=("mtp.",),
    key_rules=beside_the_trunk(),
    default=Convention(),
    conventions=_CONVENTIONS,
    head_layer_config=_head_layer_config,
    borrowed=Borrowed(
        python_module="transformers.models.qwen3_5.modeling_qwen3_5",
        layer="Qwen3_5DecoderLayer",
        norm="Qwen3_5RMSNorm",
        rotary="Qwen3_5TextRotaryEmbedding",
    ),
    rotary_axes=3,
    masks_by_layer_type=True,
    recurrent=_KERNELS,
    engines=engine_table(transformers=NO_RECURRENT_ROLLBACK),
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    title="Qwen3.5 / Qwen3.6 MoE",
    model_types=("qwen3_5_moe_text",),
    count=CountField(name="mtp_num_hidden_layers"),
    head_config_fields=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", _INTERVAL),
    trunk_prefixes=("model.language_model.", "model."),
    head_prefixes=("mtp.",),
    key_rules=beside_the_trunk(*expert_rules("mtp.layers.{module}.")),
    default=Convention(),
    conventions=_CONVENTIONS,
    head_layer_config=_head_layer_config,
    borrowed=Borrowed(
        python_module="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        layer="Qwen3_5MoeDecoderLayer",
        norm="Qwen3_5MoeRMSNorm",
        rotary="Qwen3_5MoeTextRotaryEmbedding",
    ),
    rotary_axes=3,
    masks_by_layer_type=True,
    recurrent=_KERNELS,
    engines=engine_table(transformers=NO_RECURRENT_ROLLBACK),
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    # The releases do not say; SGLang and llama.cpp take 1, vLLM wants the depth on its command line.
    count=CountField(name="num_nextn_predict_layers", implied=1),
    head_config_fields=("num_nextn_predict_layers", _INTERVAL),
    trunk_prefixes=("model.",),
    head_prefixes=("mtp.",),
    key_rules=beside_the_trunk(*expert_rules("mtp.layers.{module}.")),
    default=Convention(),
    conventions=_CONVENTIONS,
    head_layer_config=_head_layer_config_next,
    borrowed=Borrowed(
        python_module="transformers.models.qwen3_next.modeling_qwen3_next",
        layer="Qwen3NextDecoderLayer",
        norm="Qwen3NextRMSNorm",
        rotary="Qwen3NextRotaryEmbedding",
    ),
    masks_by_layer_type=True,
    recurrent=_KERNELS,
    engines=engine_table(transformers=NO_RECURRENT_ROLLBACK),
)
