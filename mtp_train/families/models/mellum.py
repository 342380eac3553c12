"""JetBrains Mellum 2: a mixture of experts, one head module under ``mtp.``."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.engines import USE_MTP, Convention, engine_table, no
from mtp_train.families.layouts import BESIDE_THE_TRUNK, beside_the_trunk, expert_rules, with_layers
from mtp_train.families.spec import Borrowed, Declaration, Family, HeadLayer, TrunkTraits, Wiring


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
