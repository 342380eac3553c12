"""Baidu ERNIE-4.5 MoE: a dense head module without a final norm, under ``model.mtp_*``."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.engines import HEAD_IGNORED, ZERO_FIRST, engine_table, no
from mtp_train.families.layouts import with_layers
from mtp_train.families.spec import Borrowed, Family, HeadLayer, KeyRule, Keys, Wiring


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
