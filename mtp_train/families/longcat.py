"""LongCat-Flash: a trunk of double layers, the head one latent attention and one dense MLP under ``model.mtp``."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.blocks import AttentionThenMlp
from mtp_train.families.engines import HEAD_IGNORED, engine_table, no
from mtp_train.families.layouts import repeated_embedding, with_layers
from mtp_train.families.spec import Borrowed, Convention, CountField, Family, KeyRule

_LAYER = "model.mtp.layers.{module}."


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # One layer of the trunk counts as two.
    return with_layers(text_config, 2 * num_modules)


def _build_layer(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    return AttentionThenMlp(
        borrowed.cls(borrowed.layer)(config, layer_idx),
        borrowed.cls("LongcatFlashMLP")(config),
        (borrowed.make_norm(config), borrowed.make_norm(config)),
    )


LONGCAT_FLASH = Family(
    name="longcat_flash",
    title="LongCat-Flash",
    model_types=("longcat_flash",),
    count=CountField(name="num_nextn_predict_layers", implied=1),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=("model.mtp.",),
    key_rules=(
        KeyRule(native=f"{_LAYER}eh_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_LAYER}enorm.m.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_LAYER}hnorm.m.weight", ours="hidden_norm.weight"),
        KeyRule(native="model.mtp.norm.weight", ours="final_norm.weight"),
        KeyRule(native=f"{_LAYER}transformer_layer.mlp.{{rest}}", ours="layer.mlp.{rest}"),
        KeyRule(native=f"{_LAYER}{{rest}}", ours="layer.{rest}"),
    ),
    shared_keys=(repeated_embedding("model.mtp.embed_tokens.weight"),),
    default=Convention(),
    conventions={"vllm": Convention(), "sglang": Convention()},
    head_layer_config=_head_layer_config,
    borrowed=Borrowed(
        python_module="transformers.models.longcat_flash.modeling_longcat_flash",
        layer="LongcatFlashMLA",
        norm="LongcatFlashRMSNorm",
        rotary="LongcatFlashRotaryEmbedding",
        build_layer=_build_layer,
    ),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("has no graph for this model")),
)
