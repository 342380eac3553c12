"""LG K-EXAONE and EXAONE 4.5: one dense head module under ``mtp.``."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, Convention, engine_table, no
from mtp_train.families.layouts import beside_the_trunk, dense_sliding, with_layers
from mtp_train.families.spec import Borrowed, Declaration, Family, HeadLayer, TrunkTraits, Wiring


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
