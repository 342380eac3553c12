"""GLM-4.5 to GLM-5.3 (mixtures of experts) and GLM-OCR (dense): the head is stored as one more layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.blocks import AttentionThenMlp
from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_KEEPS, USE_MTP, engine_table
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    INDEXER,
    KIMI_DELTA,
    REPEATED_AFTER_THE_TRUNK,
    after_the_trunk,
    expert_rules,
    sparse,
    sparse_from_the_first,
    sparse_indexed,
    with_layers,
)
from mtp_train.families.mechanisms.key_pools import GatedPools, choose_pools
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    TrunkTraits,
    Wiring,
)

_KEY_RULES = after_the_trunk(*expert_rules(AFTER_THE_TRUNK))
# vLLM recycles the state before shared_head.norm, SGLang and llama.cpp the state after it.
_VLLM_BEFORE_NORM = Convention(recycle="before_final_norm", zero_first_embedding=True)


GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5 / 4.6 / 4.7",
    model_types=("glm4_moe",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=_KEY_RULES, shared=REPEATED_AFTER_THE_TRUNK),
    wiring=Wiring(conventions={"vllm": _VLLM_BEFORE_NORM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(
        config=sparse_from_the_first,
        borrowed=Borrowed(
            python_module="transformers.models.glm4_moe.modeling_glm4_moe",
            layer="Glm4MoeDecoderLayer",
            norm="Glm4MoeRMSNorm",
            rotary="Glm4MoeRotaryEmbedding",
        ),
    ),
    engines=Engines(support=engine_table(transformers=USE_MTP)),
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=_KEY_RULES, shared=REPEATED_AFTER_THE_TRUNK),
    wiring=Wiring(conventions={"vllm": _VLLM_BEFORE_NORM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(
        config=sparse,
        borrowed=Borrowed(
            python_module="transformers.models.glm4_moe_lite.modeling_glm4_moe_lite",
            layer="Glm4MoeLiteDecoderLayer",
            norm="Glm4MoeLiteRMSNorm",
            rotary="Glm4MoeLiteRotaryEmbedding",
        ),
    ),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED)),
)

GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    title="GLM-5",
    model_types=("glm_moe_dsa",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=_KEY_RULES, shared=REPEATED_AFTER_THE_TRUNK),
    wiring=Wiring(
        # vLLM runs DeepSeek V3.2's head for this model, with the wiring of DeepSeek V3.2. llama.cpp's head has no
        # indexer: it attends to every key in texts longer than index_topk too.
        conventions={
            "vllm": Convention(zero_first_embedding=True),
            "sglang": Convention(),
            "llama.cpp": LLAMA_CPP_POSITIONS,
        },
    ),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed(
            python_module="transformers.models.glm_moe_dsa.modeling_glm_moe_dsa",
            layer="GlmMoeDsaDecoderLayer",
            norm="GlmMoeDsaRMSNorm",
            rotary="GlmMoeDsaRotaryEmbedding",
            frozen=INDEXER,
            more_outputs=True,
        ),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED)),
)


def _without_streams(borrowed: Borrowed, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    """Build the engines' layer: the trunk's attention and mixture of experts with plain residual connections."""
    attention: Any = borrowed.cls("Glm5NextTextAttention")(config, layer_idx)
    choose_pools(attention.indexer, GatedPools)
    norms = (borrowed.make_norm(config), borrowed.make_norm(config))
    return AttentionThenMlp(attention, borrowed.cls("Glm5NextTextMoE")(config), norms)


def _choose_pools(decoder: Any) -> None:
    for layer in decoder.layers:
        # Some layers have no indexer and reuse the keys that the layer before has selected.
        indexer = layer.self_attn.indexer if layer.block_type == "indexed_attention" else None
        if indexer is not None:
            choose_pools(indexer, GatedPools)


_KIMI_DELTA = "{trunk}layers.{layer}.self_attn."
GLM5_NEXT = Family(
    name="glm5_next",
    title="GLM-5.3-Flash (GLM-5-Next)",
    model_types=("glm5_next_text",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(
        trunk_prefixes=("model.language_model.", "model."),
        head_prefixes=(AFTER_THE_TRUNK,),
        rules=_KEY_RULES,
        shared=REPEATED_AFTER_THE_TRUNK,
        trunk_rules=tuple(
            KeyRule(native=f"{_KIMI_DELTA}{part}.{{rest}}", ours=f"layer.self_attn.forget_gate.{part}.{{rest}}")
            for part in ("f_a_proj", "f_b_proj")
        ),
    ),
    wiring=Wiring(
        # With index_share_for_mtp_iteration in the config, engines select keys at depth 1 and reuse them at all depths.
        # The result differs only in texts longer than index_topk.
        conventions={"vllm": Convention(zero_first_embedding=True), "sglang": Convention()},
    ),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed(
            python_module="transformers.models.glm5_next.modeling_glm5_next",
            layer="Glm5NextTextDecoderLayer",
            norm="Glm5NextTextRMSNorm",
            rotary=None,
            build_layer=_without_streams,
            frozen=INDEXER,
        ),
    ),
    trunk=TrunkTraits(
        masks_by_layer_type=True,
        only_with_vision=True,
        prepare=_choose_pools,
        recurrent=KIMI_DELTA,
        needs_transformers="5.23",
    ),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS)),
)

GLM_OCR = Family(
    name="glm_ocr",
    title="GLM-OCR",
    model_types=("glm_ocr_text",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(
        trunk_prefixes=("model.language_model.",),
        head_prefixes=(AFTER_THE_TRUNK,),
        rules=after_the_trunk(),
        shared=REPEATED_AFTER_THE_TRUNK,
    ),
    wiring=Wiring(conventions={"vllm": _VLLM_BEFORE_NORM, "sglang": Convention()}),
    layer=HeadLayer(
        config=with_layers,
        borrowed=Borrowed(
            python_module="transformers.models.glm_ocr.modeling_glm_ocr",
            layer="GlmOcrTextDecoderLayer",
            norm="GlmOcrRMSNorm",
            rotary="GlmOcrTextRotaryEmbedding",
        ),
        rotary_axes=3,
    ),
    trunk=TrunkTraits(only_with_vision=True),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS)),
)
