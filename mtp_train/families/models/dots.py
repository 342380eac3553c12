"""dots3-note: latent attention over a window or selected keys; the head has a window and its own embedding."""

from __future__ import annotations

from transformers import PretrainedConfig

from mtp_train.families.convention import Convention
from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, engine_table
from mtp_train.families.layouts import AFTER_THE_TRUNK, after_the_trunk, with_layers
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    SharedKey,
    TrunkTraits,
    Wiring,
)


def _dense_sliding(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(
        text_config.per_layer_config["sliding_attention"],
        num_modules,
        layer_types=["sliding_attention"] * num_modules,
        mlp_layer_types=["dense"] * num_modules,
    )


DOTS3_NOTE = Family(
    name="dots3_note",
    title="dots3-note",
    # In releases the text model's fields are at the top level of the config, beside the other parts.
    model_types=("dots3_note_text", "dots3_note"),
    declaration=Declaration(
        # Engines assume 1 if the config lacks the field.
        count="num_nextn_predict_layers",
        implied=1,
        others=("mtp_layer_types",),
    ),
    keys=Keys(
        trunk_prefixes=("model.language_model.", "model."),
        head_prefixes=(AFTER_THE_TRUNK, "{trunk}mtp."),
        rules=(
            KeyRule(native="{trunk}mtp.embed_tokens.weight", ours="embedding.weight"),
            *after_the_trunk(),
        ),
        shared=(SharedKey(native=f"{AFTER_THE_TRUNK}shared_head.head.weight", trunk="lm_head.weight"),),
    ),
    wiring=Wiring(
        own_embedding=True, conventions={"vllm": Convention(zero_first_embedding=True), "sglang": Convention()}
    ),
    layer=HeadLayer(
        config=_dense_sliding,
        borrowed=Borrowed(
            python_module="transformers.models.dots3_note.modeling_dots3_note",
            layer="Dots3NoteTextDecoderLayer",
            norm="Dots3NoteRMSNorm",
            rotary="Dots3NoteTextRotaryEmbedding",
        ),
        rotary_by_layer_type=True,
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS)),
)
