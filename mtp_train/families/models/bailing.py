"""Ling 3 (Bailing hybrid): a Kimi Delta Attention trunk, the head stored as one more layer after it."""

from __future__ import annotations

from mtp_train.families.engines import LLAMA_CPP_POSITIONS, USE_MTP, Convention, engine_table
from mtp_train.families.layouts import AFTER_THE_TRUNK, KIMI_DELTA, after_the_trunk, expert_rules, sparse_full
from mtp_train.families.spec import Borrowed, Family, HeadLayer, KeyRule, TrunkTraits, Wiring

_ATTENTION = f"{AFTER_THE_TRUNK}attention."
BAILING_HYBRID = Family(
    name="bailing_hybrid",
    title="Ling 3 (Bailing hybrid)",
    model_types=("bailing_hybrid",),
    keys=after_the_trunk(
        *expert_rules(AFTER_THE_TRUNK),
        KeyRule(native=f"{AFTER_THE_TRUNK}mlp.gate.expert_bias", ours="layer.mlp.gate.e_score_correction_bias"),
        KeyRule(native=f"{_ATTENTION}dense.{{rest}}", ours="layer.self_attn.o_proj.{rest}"),
        KeyRule(native=f"{_ATTENTION}{{rest}}", ours="layer.self_attn.{rest}"),
        final_norm="final_layernorm",
        embed="{trunk}word_embeddings.weight",
        trunk_rules=(KeyRule(native=f"{_ATTENTION}{{rest}}", ours="layer.self_attn.forget_gate.{rest}"),),
    ),
    wiring=Wiring(conventions={"vllm": Convention(), "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(config=sparse_full, borrowed=Borrowed.of("bailing_hybrid", "BailingHybrid")),
    trunk=TrunkTraits(masks_by_layer_type=True, recurrent=KIMI_DELTA, needs_transformers="5.23"),
    engines=engine_table(transformers=USE_MTP),
)
