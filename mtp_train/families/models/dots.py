"""dots3-note: latent attention over a window or selected keys; the head has a window and its own embedding."""

from __future__ import annotations

from dataclasses import replace

from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, ZERO_FIRST, Convention, engine_table
from mtp_train.families.layouts import REPEATED_AFTER_THE_TRUNK, WRAPPED, after_the_trunk, dense_sliding
from mtp_train.families.spec import Borrowed, Declaration, Family, HeadLayer, KeyRule, TrunkTraits, Wiring

_KEYS = after_the_trunk(trunk_prefixes=WRAPPED, shared=REPEATED_AFTER_THE_TRUNK[1:])
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
    keys=replace(
        _KEYS,
        head_prefixes=(*_KEYS.head_prefixes, "{trunk}mtp."),
        rules=(KeyRule(native="{trunk}mtp.embed_tokens.weight", ours="embedding.weight"), *_KEYS.rules),
    ),
    wiring=Wiring(own_embedding=True, conventions={"vllm": ZERO_FIRST, "sglang": Convention()}),
    layer=HeadLayer(
        config=lambda config, num_modules: dense_sliding(config.per_layer_config["sliding_attention"], num_modules),
        borrowed=Borrowed.of("dots3_note", "Dots3Note", layer="TextDecoderLayer", rotary="TextRotaryEmbedding"),
        rotary_by_layer_type=True,
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)
