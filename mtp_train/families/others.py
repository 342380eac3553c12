"""Families of one model line each: ERNIE-4.5, K-EXAONE, EXAONE 4.5, Ling 3 and Mellum 2."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, USE_MTP, engine_table, no
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    KIMI_DELTA,
    after_the_trunk,
    beside_the_trunk,
    expert_rules,
    sparse_full,
    with_layers,
)
from mtp_train.families.spec import Borrowed, CountField, Engine, Family, KeyRule

_POST_NORM: Mapping[Engine, Convention] = {"vllm": Convention(), "sglang": Convention()}


def _never_sparse(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, moe_layer_start_index=num_modules)


def _dense_with_rotary(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # What engines do: a config that says nothing of its own about the head means the trunk's first layer, as a rule a
    # sliding one. Only sliding layers know positions in this trunk, and the head knows them always, so that its full
    # attention is a window over all of them. Modules share a window; the releases have one module.
    fields = text_config.to_dict()
    kind = (fields.get("mtp_layer_types") or fields["layer_types"])[0]
    window = (fields.get("mtp_sliding_windows") or [None])[0] or fields["sliding_window"]
    if kind == "full_attention":
        window = fields["max_position_embeddings"]
    return with_layers(
        text_config,
        num_modules,
        layer_types=["sliding_attention"] * num_modules,
        mlp_layer_types=["dense"] * num_modules,
        sliding_window=window,
    )


def _as_the_first(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # What vLLM does: the kinds of the trunk's first layers, in releases sliding ones, the only ones to know positions.
    return with_layers(text_config, num_modules, layer_types=text_config.layer_types[:num_modules])


def _as_declared(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # What transformers takes where the config does not say.
    fields = text_config.to_dict()
    return with_layers(
        text_config,
        num_modules,
        layer_types=list(fields.get("mtp_layer_types") or ["sliding_attention"] * num_modules),
        mlp_layer_types=list(fields.get("mtp_mlp_layer_types") or ["sparse"] * num_modules),
    )


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    title="ERNIE-4.5 MoE",
    model_types=("ernie4_5_moe",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=("model.mtp_",),
    key_rules=(
        KeyRule(native="model.mtp_linear_proj.{module}.weight", ours="proj.weight"),
        KeyRule(native="model.mtp_emb_norm.{module}.weight", ours="embed_norm.weight"),
        KeyRule(native="model.mtp_hidden_norm.{module}.weight", ours="hidden_norm.weight"),
        KeyRule(native="model.mtp_block.{module}.{rest}", ours="layer.{rest}"),
    ),
    final_norm=False,
    # vLLM's head rotates halves as Llama does, its trunk neighbours, as both do here: its drafts differ in part, and
    # by nothing else.
    default=Convention(zero_first_embedding=True),
    conventions={"vllm": Convention(zero_first_embedding=True), "sglang": Convention(zero_first_embedding=True)},
    head_layer_config=_never_sparse,
    borrowed=Borrowed(
        python_module="transformers.models.ernie4_5_moe.modeling_ernie4_5_moe",
        layer="Ernie4_5_MoeDecoderLayer",
        norm="Ernie4_5_MoeRMSNorm",
        rotary="Ernie4_5_MoeRotaryEmbedding",
    ),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("its converter drops this head")),
)

EXAONE_MOE = Family(
    name="exaone_moe",
    title="K-EXAONE",
    model_types=("exaone_moe",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers", "mtp_layer_types", "mtp_sliding_windows"),
    trunk_prefixes=("model.",),
    head_prefixes=("mtp.",),
    key_rules=beside_the_trunk(),
    default=Convention(),
    conventions=_POST_NORM,
    head_layer_config=_dense_with_rotary,
    borrowed=Borrowed(
        python_module="transformers.models.exaone_moe.modeling_exaone_moe",
        layer="ExaoneMoeDecoderLayer",
        norm="ExaoneMoeRMSNorm",
        rotary="ExaoneMoeRotaryEmbedding",
    ),
    masks_by_layer_type=True,
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)

EXAONE4_5 = Family(
    name="exaone4_5",
    title="EXAONE 4.5",
    model_types=("exaone4_5",),
    # Releases say it of the text; vLLM reads the whole config's, which they lack, and takes 1.
    count=CountField(name="num_nextn_predict_layers", implied=1),
    head_config_fields=("num_nextn_predict_layers", "mtp_share_layers"),
    trunk_prefixes=("model.language_model.",),
    head_prefixes=("mtp.",),
    key_rules=beside_the_trunk(),
    default=Convention(),
    conventions={"vllm": Convention()},
    head_layer_config=_as_the_first,
    borrowed=Borrowed(
        python_module="transformers.models.exaone4.modeling_exaone4",
        layer="Exaone4DecoderLayer",
        norm="Exaone4RMSNorm",
        rotary="Exaone4RotaryEmbedding",
    ),
    only_with_vision=True,
    masks_by_layer_type=True,
    engines=engine_table(
        transformers=HEAD_IGNORED,
        sglang=no("has no class for this model"),
        llama_cpp=LLAMA_CPP_KEEPS,
    ),
)

_ATTENTION = f"{AFTER_THE_TRUNK}attention."
BAILING_HYBRID = Family(
    name="bailing_hybrid",
    title="Ling 3 (Bailing hybrid)",
    model_types=("bailing_hybrid",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    embed_key="{trunk}word_embeddings.weight",
    head_prefixes=(AFTER_THE_TRUNK,),
    key_rules=after_the_trunk(
        *expert_rules(AFTER_THE_TRUNK),
        KeyRule(native=f"{AFTER_THE_TRUNK}mlp.gate.expert_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{_ATTENTION}dense.{{rest}}", ours="layer.self_attn.o_proj.{rest}"),
        KeyRule(native=f"{_ATTENTION}{{rest}}", ours="layer.self_attn.{rest}"),
        final_norm="final_layernorm",
    ),
    trunk_rules=(KeyRule(native=f"{_ATTENTION}{{rest}}", ours="layer.self_attn.forget_gate.{rest}"),),
    default=Convention(),
    conventions={**_POST_NORM, "llama.cpp": LLAMA_CPP_POSITIONS},
    head_layer_config=sparse_full,
    borrowed=Borrowed(
        python_module="transformers.models.bailing_hybrid.modeling_bailing_hybrid",
        layer="BailingHybridDecoderLayer",
        norm="BailingHybridRMSNorm",
        rotary="BailingHybridRotaryEmbedding",
    ),
    masks_by_layer_type=True,
    recurrent=KIMI_DELTA,
    needs_transformers="5.23",
    engines=engine_table(transformers=USE_MTP),
)

MELLUM = Family(
    name="mellum",
    title="Mellum 2",
    model_types=("mellum",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    trunk_prefixes=("model.",),
    head_prefixes=("mtp.",),
    key_rules=beside_the_trunk(*expert_rules("mtp.layers.{module}.")),
    default=Convention(),
    # vLLM runs transformers' own head.
    conventions={"vllm": Convention()},
    head_layer_config=_as_declared,
    borrowed=Borrowed(
        python_module="transformers.models.mellum.modeling_mellum",
        layer="MellumDecoderLayer",
        norm="MellumRMSNorm",
        rotary="MellumRotaryEmbedding",
    ),
    rotary_by_layer_type=True,
    masks_by_layer_type=True,
    engines=engine_table(
        transformers=USE_MTP,
        sglang=no("loads the trunk and has no MTP for this model"),
        llama_cpp=no("has no graph for this head, and its converter refuses the head's keys"),
    ),
)
