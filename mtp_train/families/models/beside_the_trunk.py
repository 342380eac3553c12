"""Heads beside their trunk, under a prefix of their own: K-EXAONE and EXAONE 4.5, Mellum 2, ERNIE-4.5.

Each is one module around a layer of the trunk's own class; ERNIE-4.5's is dense, has no final norm, and its keys are
``model.mtp_*``.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, USE_MTP, ZERO_FIRST, Convention, engine_table, no
from mtp_train.families.layouts import BESIDE_THE_TRUNK, beside_the_trunk, dense_sliding, expert_rules, with_layers
from mtp_train.families.spec import Borrowed, Declaration, Family, HeadLayer, KeyRule, Keys, TrunkTraits, Wiring


def _dense_with_rotary(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # As in engines: without mtp_layer_types the head has the type of the trunk's first layer, as a rule a sliding one.
    # In this trunk only sliding layers use rotary embeddings, but the head always does. Full attention in the head is
    # therefore a sliding layer whose window covers every position. All modules share a window; releases have one.
    fields = text_config.to_dict()
    kind = (fields.get("mtp_layer_types") or fields["layer_types"])[0]
    window = (fields.get("mtp_sliding_windows") or [None])[0] or fields["sliding_window"]
    if kind == "full_attention":
        window = fields["max_position_embeddings"]
    return dense_sliding(with_layers(text_config, num_modules, sliding_window=window), num_modules)


def _as_the_first(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # As in vLLM: the types of the trunk's first layers. In releases these are sliding, and only sliding layers use
    # rotary embeddings.
    return with_layers(text_config, num_modules, layer_types=text_config.layer_types[:num_modules])


EXAONE_MOE = Family(
    name="exaone_moe",
    title="K-EXAONE",
    model_types=("exaone_moe",),
    declaration=Declaration(count="num_nextn_predict_layers", others=("mtp_layer_types", "mtp_sliding_windows")),
    keys=beside_the_trunk(),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention()}),
    layer=HeadLayer(config=_dense_with_rotary, borrowed=Borrowed.of("exaone_moe", "ExaoneMoe")),
    trunk=TrunkTraits(masks_by_layer_type=True),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)

EXAONE4_5 = Family(
    name="exaone4_5",
    title="EXAONE 4.5",
    model_types=("exaone4_5",),
    declaration=Declaration(
        # Releases have the count in the text config. vLLM reads it from the whole config, which lacks it, and takes 1.
        count="num_nextn_predict_layers",
        implied=1,
        others=("mtp_share_layers",),
    ),
    keys=beside_the_trunk(trunk_prefixes=("model.language_model.",)),
    wiring=Wiring(conventions={"vllm": Convention()}),
    layer=HeadLayer(config=_as_the_first, borrowed=Borrowed.of("exaone4", "Exaone4")),
    trunk=TrunkTraits(only_with_vision=True, masks_by_layer_type=True),
    engines=engine_table(
        transformers=HEAD_IGNORED, sglang=no("has no class for this model"), llama_cpp=LLAMA_CPP_KEEPS
    ),
)


def _as_declared(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # The defaults are transformers'.
    fields = text_config.to_dict()
    return with_layers(
        text_config,
        num_modules,
        layer_types=list(fields.get("mtp_layer_types") or ["sliding_attention"] * num_modules),
        mlp_layer_types=list(fields.get("mtp_mlp_layer_types") or ["sparse"] * num_modules),
    )


MELLUM = Family(
    name="mellum",
    title="Mellum 2",
    model_types=("mellum",),
    declaration=Declaration(count="num_nextn_predict_layers", others=("mtp_layer_types", "mtp_mlp_layer_types")),
    keys=beside_the_trunk(*expert_rules(BESIDE_THE_TRUNK)),
    # vLLM runs transformers' own head.
    wiring=Wiring(conventions={"vllm": Convention()}),
    layer=HeadLayer(config=_as_declared, borrowed=Borrowed.of("mellum", "Mellum"), rotary_by_layer_type=True),
    trunk=TrunkTraits(masks_by_layer_type=True),
    engines=engine_table(
        transformers=USE_MTP,
        sglang=no("loads the trunk and has no MTP for this model"),
        llama_cpp=no("has no graph for this head, and its converter refuses the head's keys"),
    ),
)


def _never_sparse(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, moe_layer_start_index=num_modules)


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    title="ERNIE-4.5 MoE",
    model_types=("ernie4_5_moe",),
    keys=Keys(
        head_prefixes=("model.mtp_",),
        rules=(
            KeyRule(native="model.mtp_linear_proj.{module}.weight", ours="proj.weight"),
            KeyRule(native="model.mtp_emb_norm.{module}.weight", ours="embed_norm.weight"),
            KeyRule(native="model.mtp_hidden_norm.{module}.weight", ours="hidden_norm.weight"),
            KeyRule(native="model.mtp_block.{module}.{rest}", ours="layer.{rest}"),
        ),
    ),
    wiring=Wiring(
        final_norm=False,
        # vLLM's head rotates halves like Llama, vLLM's trunk rotates neighbouring channels, as both do here. vLLM's
        # drafts differ from ours for this reason alone.
        default=ZERO_FIRST,
        conventions={"vllm": ZERO_FIRST, "sglang": ZERO_FIRST},
    ),
    layer=HeadLayer(config=_never_sparse, borrowed=Borrowed.of("ernie4_5_moe", "Ernie4_5_Moe")),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=no("its converter drops this head")),
)
