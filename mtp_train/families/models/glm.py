"""GLM-4.5 to GLM-5.3 (mixtures of experts) and GLM-OCR (dense): the head is stored as one more layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.engines import (
    HEAD_IGNORED,
    LLAMA_CPP_KEEPS,
    LLAMA_CPP_POSITIONS,
    USE_MTP,
    ZERO_FIRST,
    Convention,
    engine_table,
)
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    EXPERTS_AFTER_THE_TRUNK,
    INDEXER,
    KIMI_DELTA,
    REPEATED_AFTER_THE_TRUNK,
    WRAPPED,
    AttentionThenMlp,
    after_the_trunk,
    sparse,
    sparse_from_the_first,
    sparse_indexed,
    with_layers,
)
from mtp_train.families.mechanisms.key_pools import GatedPools, choose_pools
from mtp_train.families.spec import Borrowed, Family, HeadLayer, KeyRule, TrunkTraits, Wiring

# vLLM recycles the state before shared_head.norm, SGLang and llama.cpp the state after it.
_VLLM = Convention(recycle="before_final_norm", zero_first_embedding=True)
_WIRING = Wiring(conventions={"vllm": _VLLM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS})


GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5 / 4.6 / 4.7",
    model_types=("glm4_moe",),
    keys=EXPERTS_AFTER_THE_TRUNK,
    wiring=_WIRING,
    layer=HeadLayer(config=sparse_from_the_first, borrowed=Borrowed.of("glm4_moe", "Glm4Moe")),
    engines=engine_table(transformers=USE_MTP),
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    keys=EXPERTS_AFTER_THE_TRUNK,
    wiring=_WIRING,
    layer=HeadLayer(config=sparse, borrowed=Borrowed.of("glm4_moe_lite", "Glm4MoeLite")),
    engines=engine_table(transformers=HEAD_IGNORED),
)

GLM_MOE_DSA = Family(
    name="glm_moe_dsa",
    title="GLM-5",
    model_types=("glm_moe_dsa",),
    keys=EXPERTS_AFTER_THE_TRUNK,
    # vLLM runs DeepSeek V3.2's head for this model, with the wiring of DeepSeek V3.2. llama.cpp's head has no
    # indexer: it attends to every key in texts longer than index_topk too.
    wiring=Wiring(conventions={"vllm": ZERO_FIRST, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed.of("glm_moe_dsa", "GlmMoeDsa", frozen=INDEXER, more_outputs=True),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=engine_table(transformers=HEAD_IGNORED),
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


_KIMI_DELTA = f"{AFTER_THE_TRUNK}self_attn."
GLM5_NEXT = Family(
    name="glm5_next",
    title="GLM-5.3-Flash (GLM-5-Next)",
    model_types=("glm5_next_text",),
    keys=replace(
        EXPERTS_AFTER_THE_TRUNK,
        trunk_prefixes=WRAPPED,
        trunk_rules=tuple(
            KeyRule(native=f"{_KIMI_DELTA}{part}.{{rest}}", ours=f"layer.self_attn.forget_gate.{part}.{{rest}}")
            for part in ("f_a_proj", "f_b_proj")
        ),
    ),
    # With index_share_for_mtp_iteration in the config, engines select keys at depth 1 and reuse them at all depths. The
    # result differs only in texts longer than index_topk.
    wiring=Wiring(conventions={"vllm": ZERO_FIRST, "sglang": Convention()}),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed.of("glm5_next", "Glm5NextText", rotary=None, build_layer=_without_streams, frozen=INDEXER),
    ),
    trunk=TrunkTraits(
        masks_by_layer_type=True,
        only_with_vision=True,
        prepare=_choose_pools,
        recurrent=KIMI_DELTA,
        needs_transformers="5.23",
    ),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)

GLM_OCR = Family(
    name="glm_ocr",
    title="GLM-OCR",
    model_types=("glm_ocr_text",),
    keys=after_the_trunk(trunk_prefixes=("model.language_model.",), shared=REPEATED_AFTER_THE_TRUNK),
    wiring=Wiring(conventions={"vllm": _VLLM, "sglang": Convention()}),
    layer=HeadLayer(
        config=with_layers,
        borrowed=Borrowed.of("glm_ocr", "GlmOcr", layer="TextDecoderLayer", rotary="TextRotaryEmbedding"),
        rotary_axes=3,
    ),
    trunk=TrunkTraits(only_with_vision=True),
    engines=engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_KEEPS),
)
