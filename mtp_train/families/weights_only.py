"""Families whose heads are inspected, grafted and exported, but not run: their layers need what is not here yet."""

from __future__ import annotations

from mtp_train.families.engines import USE_MTP, engine_table, no
from mtp_train.families.spec import Convention, CountField, Family, KeyRule

_INKLING = "model.mtp.layers.{module}."
INKLING = Family(
    name="inkling",
    title="Inkling",
    model_types=("inkling_text",),
    count=CountField(name="num_nextn_predict_layers", section="mtp_config"),
    head_config_fields=(),
    trunk_prefixes=("model.llm.", "model."),
    embed_key="{trunk}embed.weight",
    head_prefixes=("model.mtp.",),
    key_rules=(
        KeyRule(native=f"{_INKLING}input_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_INKLING}embed_norm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_INKLING}hidden_norm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_INKLING}transformer_block.{{rest}}", ours="layer.{rest}"),
        KeyRule(native="model.mtp.chain_norm.weight", ours="final_norm.weight", optional=True),
    ),
    concat="hidden_first",
    final_norm=False,
    default=Convention(),
    conventions={"vllm": Convention(), "sglang": Convention()},
    why_not_run="its modules keep convolution states and a norm in common, which our head does not have",
    engines=engine_table(transformers=USE_MTP, llama_cpp=no("has no graph for this model")),
)

WEIGHTS_ONLY = (INKLING,)
