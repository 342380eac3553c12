"""Heads that are layers after the trunk's last: DeepSeek, GLM, Hunyuan, Ling 3, Step-3.5 and 3.7, dots3-note.

DeepSeek V4 and Hunyuan 4 have several residual streams in their trunks and a prefix of their own for the head, Step
three chained modules with an lm_head each, dots3-note a head with a window and an embedding of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import PretrainedConfig

from mtp_train.families import engines, layouts
from mtp_train.families.engines import Convention, no, remarked
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    EXPERTS_AFTER_THE_TRUNK,
    INDEXER,
    KIMI_DELTA,
    REPEATED_AFTER_THE_TRUNK,
    WRAPPED,
)
from mtp_train.families.mechanisms.compressed_keys import compressing_in_windows
from mtp_train.families.mechanisms.key_pools import GatedPools, choose_pools
from mtp_train.families.spec import (
    Declaration,
    Family,
    HeadLayer,
    Keys,
    Streams,
    TrunkTraits,
    Wiring,
)

_WIRING = Wiring(conventions={**engines.ALIKE, "vllm": engines.ZERO_FIRST})
_ZERO_FIRST_IN_VLLM = Wiring(conventions={"vllm": engines.ZERO_FIRST, "sglang": Convention()})
_SINCE_5_23 = TrunkTraits(needs_transformers="5.23")


_HY_V4_GATE = {"self_attn.linear_gate.{rest}": "layer.self_attn.gate_proj.{rest}"}
_HY_V4_LAYER = HeadLayer(
    "hy_v4",
    "HYV4",
    config=layouts.sparse_indexed,
    build_layer=layouts.attention_then_mlp("Attention", "MoE"),
    frozen=INDEXER,
)
HY_V4 = Family(
    name="hy_v4",
    title="Hunyuan 4",
    declaration=Declaration(others=("mtp_quant_algo",)),
    keys=Keys(
        head_prefixes=("model.mtp_layers.",),
        rules=layouts.key_rules(
            "model.mtp_layers.{module}.",
            {
                **layouts.ENDS,
                **layouts.FINAL_NORM,
                "self_attn.learnable_sink_param": "layer.self_attn.sinks",
                **_HY_V4_GATE,
                **layouts.experts(),
                **layouts.LAYER,
            },
        ),
        trunk_rules=layouts.key_rules(AFTER_THE_TRUNK, _HY_V4_GATE),
    ),
    wiring=_ZERO_FIRST_IN_VLLM,
    layer=_HY_V4_LAYER,
    trunk=_SINCE_5_23,
    engines={"llama.cpp": no("its converter drops this head")},
)


def _step_layers(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    layer_types = (text_config.mtp_layer_types or ["full_attention"] * num_modules)[:num_modules]
    sliding = {"num_attention_heads": text_config.num_sliding_attention_heads}
    return layouts.with_layers(
        text_config,
        num_modules,
        layer_types=layer_types,
        mlp_layer_types=(text_config.mtp_mlp_layer_types or ["dense"] * num_modules)[:num_modules],
        per_layer_config={index: sliding for index, kind in enumerate(layer_types) if kind == "sliding_attention"},
        # These lists cover the trunk's layers only.
        swiglu_limits=None,
        swiglu_limits_shared=None,
    )


DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    title="DeepSeek V3.2",
    keys=EXPERTS_AFTER_THE_TRUNK,
    # llama.cpp's head has no indexer: it attends to every key in texts longer than index_topk too.
    wiring=_WIRING,
    layer=HeadLayer("deepseek_v32", "DeepseekV32", config=layouts.sparse_indexed, frozen=INDEXER),
    trunk=_SINCE_5_23,
)

_MODULE = "mtp.{module}."
_MIXING = ("fn", "base", "scale")
_DEEPSEEK_V4_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "ffn.gate": "mlp.gate",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
"""Names of the matrices and norms of every layer: a release's to transformers'."""
_DEEPSEEK_V4_COMPRESSOR = {
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
}
"""The same for matrices that only the trunk's layers have."""
_DEEPSEEK_V4_EXPERTS = {
    "ffn.experts.{expert}.w1": "mlp.experts.{expert}.gate_proj",
    "ffn.experts.{expert}.w2": "mlp.experts.{expert}.down_proj",
    "ffn.experts.{expert}.w3": "mlp.experts.{expert}.up_proj",
}
# In all engines the head reads the streams before they are mixed, and recycles the streams of its layer.
_VLLM_V4 = replace(engines.BEFORE_NORM, zero_first_embedding=True)

_RELEASES_NAMES = "  # with a release's tensor names, which transformers' save_pretrained changes"


DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    title="DeepSeek V4",
    keys=Keys(
        # Releases have no prefix. transformers' save_pretrained adds one, and does not restore all release names.
        trunk_prefixes=("model.", ""),
        embed_by_prefix={"": "embed.weight"},
        lm_head="head.weight",
        saved_names={"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."},
        head_prefixes=("mtp.",),
        rules=layouts.key_rules(
            _MODULE,
            {
                **layouts.weights(
                    {
                        "e_proj": "token_proj",
                        "h_proj": "hidden_proj",
                        "enorm": "embed_norm",
                        "hnorm": "hidden_norm",
                        "norm": "final_norm",
                    }
                ),
                **{f"hc_head_{one}": f"mixer.hc_{one}" for one in _MIXING},
                **{f"hc_{part}_{one}": f"layer.{part}_hc.{one}" for part in ("attn", "ffn") for one in _MIXING},
                "attn.attn_sink": "layer.self_attn.sinks",
                "ffn.gate.bias": "layer.mlp.gate.e_score_correction_bias",
                **layouts.experts("ffn.experts", ("w1", "w3", "w2")),
                "ffn.experts.{rest}": "layer.mlp.experts.{rest}",
                **layouts.weights(_DEEPSEEK_V4_LAYER, "layer."),
            },
        ),
        shared={f"{_MODULE}emb.tok_emb.weight": "embed.weight", f"{_MODULE}head.weight": "head.weight"},
        trunk_rules=layouts.key_rules(
            AFTER_THE_TRUNK,
            layouts.weights(_DEEPSEEK_V4_LAYER | _DEEPSEEK_V4_COMPRESSOR | _DEEPSEEK_V4_EXPERTS, "layer."),
        ),
    ),
    wiring=Wiring(
        concat="sum",
        default=_VLLM_V4,
        conventions={"vllm": _VLLM_V4, "sglang": engines.BEFORE_NORM, "llama.cpp": engines.BEFORE_NORM},
    ),
    # vLLM's head layers have neither compressed keys nor routing by token id.
    layer=HeadLayer(
        "deepseek_v4",
        "DeepseekV4",
        config=layouts.layers_of(layer_types="sliding_attention", mlp_layer_types="moe"),
        rotary_kind="main",
    ),
    trunk=TrunkTraits(
        streams=Streams(count="hc_mult", mixer="DeepseekV4HyperHead", trunk_mixer="hc_head"),
        running_windows=compressing_in_windows,
    ),
    engines={
        "vllm": remarked(engines.VLLM, _RELEASES_NAMES),
        "sglang": remarked(engines.SGLANG, _RELEASES_NAMES),
        "llama.cpp": remarked(
            engines.LLAMA_CPP_BESIDE, "  # the converter takes routed experts in FP4 alone, as releases have them"
        ),
    },
)


# vLLM recycles the state before shared_head.norm, SGLang and llama.cpp the state after it.
_GLM_IN_VLLM = Convention(recycle="before_final_norm", zero_first_embedding=True)
_GLM_WIRING = Wiring(conventions={**engines.ALIKE, "vllm": _GLM_IN_VLLM})


_POOLS = partial(choose_pools, kind=GatedPools)


FAMILIES = (
    Family(
        name="deepseek_v3",
        title="DeepSeek V3 / R1",
        keys=EXPERTS_AFTER_THE_TRUNK,
        wiring=_WIRING,
        layer=HeadLayer("deepseek_v3", "DeepseekV3", config=layouts.sparse_from_the_first),
        # llama.cpp's converter drops the head, but its graph, which also serves GLM-4.7-Flash, loads it.
        engines={"transformers": engines.USE_MTP, "llama.cpp": engines.LLAMA_CPP_BESIDE},
    ),
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    Family(
        name="glm4_moe",
        title="GLM-4.5 / 4.6 / 4.7",
        keys=EXPERTS_AFTER_THE_TRUNK,
        wiring=_GLM_WIRING,
        layer=HeadLayer("glm4_moe", "Glm4Moe", config=layouts.sparse_from_the_first),
        engines={"transformers": engines.USE_MTP},
    ),
    Family(
        name="glm4_moe_lite",
        title="GLM-4.7-Flash",
        keys=EXPERTS_AFTER_THE_TRUNK,
        wiring=_GLM_WIRING,
        layer=HeadLayer("glm4_moe_lite", "Glm4MoeLite", config=layouts.sparse),
    ),
    # vLLM runs DeepSeek V3.2's head for this model, with the wiring of DeepSeek V3.2.
    replace(
        DEEPSEEK_V32,
        name="glm_moe_dsa",
        title="GLM-5",
        layer=HeadLayer("glm_moe_dsa", "GlmMoeDsa", config=layouts.sparse_indexed, frozen=INDEXER),
    ),
    Family(
        name="glm5_next",
        title="GLM-5.3-Flash (GLM-5-Next)",
        config_types=("glm5_next_text",),
        keys=replace(
            EXPERTS_AFTER_THE_TRUNK,
            trunk_prefixes=WRAPPED,
            trunk_rules=layouts.key_rules(
                AFTER_THE_TRUNK,
                {
                    "self_attn.f_a_proj.{rest}": "layer.self_attn.forget_gate.f_a_proj.{rest}",
                    "self_attn.f_b_proj.{rest}": "layer.self_attn.forget_gate.f_b_proj.{rest}",
                },
            ),
        ),
        # With index_share_for_mtp_iteration in the config, engines select keys at depth 1 and reuse them at all depths.
        # The result differs only in texts longer than index_topk.
        wiring=_ZERO_FIRST_IN_VLLM,
        layer=HeadLayer(
            "glm5_next",
            "Glm5NextText",
            config=layouts.sparse_indexed,
            rotary=None,
            build_layer=layouts.attention_then_mlp("Attention", "MoE"),
            prepare=_POOLS,
            frozen=INDEXER,
        ),
        trunk=TrunkTraits(only_with_vision=True, prepare=_POOLS, recurrent=KIMI_DELTA, needs_transformers="5.23"),
        engines={"llama.cpp": engines.LLAMA_CPP_KEEPS},
    ),
    Family(
        name="glm_ocr",
        title="GLM-OCR",
        config_types=("glm_ocr_text",),
        keys=layouts.after_the_trunk(trunk_prefixes=("model.language_model.",), shared=REPEATED_AFTER_THE_TRUNK),
        wiring=Wiring(conventions={"vllm": _GLM_IN_VLLM, "sglang": Convention()}),
        layer=HeadLayer(
            "glm_ocr",
            "GlmOcr",
            config=layouts.with_layers,
            layer="TextDecoderLayer",
            rotary="TextRotaryEmbedding",
            rotary_axes=3,
        ),
        trunk=TrunkTraits(only_with_vision=True),
        engines={"llama.cpp": engines.LLAMA_CPP_KEEPS},
    ),
    Family(
        name="hy_v3",
        title="Hunyuan 3",
        keys=layouts.after_the_trunk(
            {
                **layouts.experts(),
                "mlp.router.gate.weight": "layer.mlp.gate.weight",
                "mlp.expert_bias": "layer.mlp.e_score_correction_bias",
                "mlp.shared_mlp.{rest}": "layer.mlp.shared_experts.{rest}",
            },
            final_norm="final_layernorm",
        ),
        wiring=_WIRING,
        layer=HeadLayer("hy_v3", "HYV3", config=layouts.sparse),
    ),
    HY_V4,
    # The vision-language release: the same head around a text model with rotary positions of three axes.
    replace(
        HY_V4,
        name="hy_v4_vl",
        title="Hunyuan 4 VL",
        config_types=("hy_v4_vl_text", "hy_v4_vl"),
        layer=replace(_HY_V4_LAYER, model="hy_v4_vl", prefix="HYV4VL", rotary_axes=3),
        trunk=TrunkTraits(only_with_vision=True, needs_transformers="5.24"),
        engines=dict.fromkeys(("vllm", "sglang", "llama.cpp"), engines.UNVERIFIED),
    ),
    Family(
        name="bailing_hybrid",
        title="Ling 3 (Bailing hybrid)",
        keys=layouts.after_the_trunk(
            {
                **layouts.experts(),
                "mlp.gate.expert_bias": "layer.mlp.gate.e_score_correction_bias",
                "attention.dense.{rest}": "layer.self_attn.o_proj.{rest}",
                "attention.{rest}": "layer.self_attn.{rest}",
            },
            final_norm="final_layernorm",
            embed="{trunk}word_embeddings.weight",
            trunk_rules=layouts.key_rules(AFTER_THE_TRUNK, {"attention.{rest}": "layer.self_attn.forget_gate.{rest}"}),
        ),
        wiring=Wiring(conventions=engines.ALIKE),
        layer=HeadLayer("bailing_hybrid", "BailingHybrid", config=layouts.sparse_full),
        trunk=TrunkTraits(recurrent=KIMI_DELTA, needs_transformers="5.23"),
        engines={"transformers": engines.USE_MTP},
    ),
    Family(
        name="step3p7",
        title="Step-3.5 / 3.7",
        config_types=("step3p5",),
        keys=layouts.after_the_trunk(
            {
                "transformer.shared_head.output.weight": "lm_head.weight",
                "moe.gate.weight": "layer.mlp.gate.weight",
                "moe.router_bias": "layer.mlp.gate.e_score_correction_bias",
                "moe.gate_proj.weight": "layer.mlp.experts.gate_up_proj",
                "moe.up_proj.weight": "layer.mlp.experts.gate_up_proj",
                "moe.down_proj.weight": "layer.mlp.experts.down_proj",
                "share_expert.{rest}": "layer.mlp.shared_experts.{rest}",
            },
            final_norm="transformer.shared_head.norm",
        ),
        wiring=Wiring(
            own_lm_head=True,
            default=engines.BEFORE_NORM,
            conventions={
                "vllm": engines.BEFORE_NORM,
                "sglang": engines.BEFORE_NORM,
                "llama.cpp": replace(engines.BEFORE_NORM, prefix="trunk"),
            },
        ),
        layer=HeadLayer("step3p7", "Step3p7", config=_step_layers),
        trunk=TrunkTraits(only_with_vision=True),
        engines={"transformers": no("generate(use_mtp=True) reads and recycles other states and the trunk's lm_head")},
    ),
    Family(
        name="dots3_note",
        title="dots3-note",
        # In releases the text model's fields are at the top level of the config, beside the other parts.
        config_types=("dots3_note_text", "dots3_note"),
        declaration=Declaration(
            # Engines assume 1 if the config lacks the field.
            implied=1,
            others=("mtp_layer_types",),
        ),
        keys=Keys(
            trunk_prefixes=WRAPPED,
            head_prefixes=(AFTER_THE_TRUNK, "{trunk}mtp."),
            rules=layouts.key_rules("{trunk}mtp.", {"embed_tokens.weight": "embedding.weight"})
            + layouts.after_the_trunk().rules,
            shared=layouts.LM_HEAD_AFTER_THE_TRUNK,
        ),
        wiring=replace(_ZERO_FIRST_IN_VLLM, own_embedding=True),
        layer=HeadLayer(
            "dots3_note",
            "Dots3Note",
            config=lambda config, num_modules: layouts.dense_sliding(
                config.per_layer_config["sliding_attention"], num_modules
            ),
            layer="TextDecoderLayer",
            rotary="TextRotaryEmbedding",
        ),
        trunk=_SINCE_5_23,
        engines={"llama.cpp": engines.LLAMA_CPP_KEEPS},
    ),
)
