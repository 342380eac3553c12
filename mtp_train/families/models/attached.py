"""Trunks whose releases carry no head: the key layout of an attached head, and the engines that serve it.

The attached head is DeepSeek-V3's MTP module (arXiv:2412.19437, equations 21 to 23) around one decoder layer of the
trunk's own class, with full attention. It is stored as transformers' ``MtpModel`` reads it (``mtp.*``,
``num_mtp_layers``); for Qwen3-MoE, SGLang reads the same layout. Two families differ: a head for Qwen2 is stored as
MiMo-7B stores one, because MiMo-7B has a Qwen2 trunk; a head for Command A+ as llama.cpp reads it, after the
trunk's layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from mtp_train.families import layouts
from mtp_train.families.engines import Convention, Engines, EngineSupport, no, remarked, use_mtp_named
from mtp_train.families.layouts import AFTER_THE_TRUNK, EXPERTS_AFTER_THE_TRUNK
from mtp_train.families.mechanisms.trained_length import keep_short_factors, short_factors
from mtp_train.families.models.beside_the_trunk import MIMO
from mtp_train.families.spec import Declaration, Family, HeadLayer, LayersConfig, TrunkTraits, Wiring, has_layer_types
from mtp_train.upstream.transformers_private import attention_of, set_attention

# transformers' causal language models of these types declare no head keys.
_USE_MTP_TOLD = use_mtp_named(r"^mtp\.")
_NO_VLLM = no(
    "has no such head of its own for this model, and its transformers backend finds one by the keys that the model's "
    "class names, which transformers' own class does not"
)
_NO_LLAMA_CPP = no("has no graph for this head")


def transformers_only(transformers: EngineSupport) -> Engines:
    """Return the engines' table of a head that vLLM, SGLang and llama.cpp do not load."""
    return {
        "transformers": transformers,
        "vllm": _NO_VLLM,
        "sglang": no("has no head for this model"),
        "llama.cpp": _NO_LLAMA_CPP,
    }


_TRANSFORMERS_ONLY = transformers_only(_USE_MTP_TOLD)
# transformers samples drafts from the lm_head's output, before the model's own scale or bound of logits.
_UNSCALED = transformers_only(
    remarked(
        _USE_MTP_TOLD, "; sampled drafts are drawn without the model's scale or bound of logits, fewer are accepted"
    )
)
_OURS_ONLY = transformers_only(no("builds a head only where the config calls the norms' epsilon rms_norm_eps"))


def _full_attention(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # Without kinds of layers, transformers builds the head's KV cache from the trunk's sliding window, and drops keys
    # beyond it.
    config = layouts.full if has_layer_types(text_config) else layouts.layers_of(sliding_window=None)
    return config(text_config, num_modules)


def attached(
    model_type: str,
    title: str,
    prefix: str,
    *,
    model: str | None = None,
    config: LayersConfig = _full_attention,
    **parts: Any,
) -> Family:
    """Return the record of a trunk whose attached head is stored in the layout of transformers' ``MtpModel``.

    Args:
        model_type: The config's ``model_type``; also the family's name.
        prefix: ``HeadLayer.prefix``.
        model: ``HeadLayer.model``; None if it is the model type.
        config: ``HeadLayer.config``.
        **parts: Further fields of :class:`Family`. Without ``engines``, transformers alone loads the head.
    """
    usual = {
        "declaration": Declaration(
            count="num_mtp_layers",
            # transformers needs the kinds of a head's layers if the trunk's layers are of several kinds.
            beside={"mtp_layer_types": ["full_attention"]},
            others=("mtp_layer_types",),
        ),
        "keys": layouts.beside_the_trunk(),
        "layer": HeadLayer(model or model_type, prefix, config=config),
        "engines": _TRANSFORMERS_ONLY,
    }
    return Family(name=model_type, title=title, attached=True, **{**usual, **parts})


LLAMA = attached("llama", "Llama 2 / 3", "Llama")


def _keep_score_bounds(decoder: Any) -> None:
    # transformers 5.17 runs Gemma 2 with torch's fused attention, which leaves out the bound on attention scores.
    if attention_of(decoder.config) == "sdpa":
        set_attention(decoder.config, "eager")


_MIXTRAL_LAYER = {
    **layouts.experts("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "block_sparse_moe.{rest}": "layer.mlp.{rest}",
}
_MIXTRAL_KEYS = layouts.beside_the_trunk(_MIXTRAL_LAYER, trunk_rules=layouts.key_rules(AFTER_THE_TRUNK, _MIXTRAL_LAYER))
_SCALED_LOGITS = TrunkTraits(logit_divisor=lambda config: 1.0 / config["logit_scale"])


def _always_rotate(layer: Any) -> None:
    # In the trunk, layers with full attention use rotary embeddings only if they are dense. llama.cpp's head always
    # does.
    layer.self_attn.force_rope = True


ATTACHED: tuple[Family, ...] = (
    LLAMA,
    attached("mistral", "Mistral", "Mistral"),
    # Queries are scaled by their position in steps of thousands, and transformers runs the head's rows one position
    # later than this package: one row in each step has another scale.
    attached("ministral3", "Ministral 3 (text)", "Ministral3"),
    attached("mixtral", "Mixtral", "Mixtral", keys=_MIXTRAL_KEYS),
    # The configs of releases count modules (num_mtp_modules); no release has their tensors.
    attached(
        "minimax_m2",
        "MiniMax-M2",
        "MiniMaxM2",
        keys=_MIXTRAL_KEYS,
        # Releases have rotary_dim, half of the head size. transformers 5.17 ignores it and rotates every channel.
        trunk=TrunkTraits(needs_transformers="5.18"),
    ),
    # vLLM and SGLang load the head because of the architecture's name. The model type stays, so that transformers still
    # loads the trunk. vLLM reads the state before the trunk's final norm, SGLang the state after it.
    attached(
        "qwen2",
        "Qwen2 / Qwen2.5",
        "Qwen2",
        declaration=replace(MIMO.declaration, beside={"architectures": ["MiMoForCausalLM"]}, others=("architectures",)),
        keys=MIMO.keys,
        wiring=replace(MIMO.wiring, default=MIMO.wiring.conventions["vllm"]),
        layer=MIMO.layer,
        engines={
            "llama.cpp": no(
                "has no graph for this head; to convert the trunk, put Qwen2ForCausalLM back into config.json"
            )
        },
    ),
    attached(
        "qwen2_moe",
        "Qwen2 MoE",
        "Qwen2Moe",
        config=layouts.every_layer_sparse,
        keys=layouts.EXPERTS_BESIDE_THE_TRUNK,
    ),
    attached("qwen3", "Qwen3 dense", "Qwen3"),
    attached(
        "qwen3_moe",
        "Qwen3 MoE",
        "Qwen3Moe",
        config=layouts.layers_of(sliding_window=None, mlp_only_layers=[], decoder_sparse_step=1),
        keys=layouts.EXPERTS_BESIDE_THE_TRUNK,
        wiring=Wiring(conventions={"sglang": Convention()}),
        engines={"transformers": _USE_MTP_TOLD, "vllm": _NO_VLLM, "llama.cpp": _NO_LLAMA_CPP},
    ),
    attached(
        "gemma2",
        "Gemma 2",
        "Gemma2",
        trunk=TrunkTraits(prepare=_keep_score_bounds),
        engines=_UNSCALED,
    ),
    attached("gemma3_text", "Gemma 3 (text)", "Gemma3", model="gemma3"),
    attached(
        "phi3",
        "Phi-3 / Phi-4",
        "Phi3",
        config=lambda config, num_modules: short_factors(_full_attention(config, num_modules)),
        trunk=TrunkTraits(prepare=keep_short_factors),
    ),
    attached("gpt_oss", "gpt-oss", "GptOss"),
    attached("olmo2", "OLMo 2", "Olmo2"),
    attached("olmo3", "OLMo 3", "Olmo3"),
    # The head reads embeddings without the trunk's multiplier. Its norm of the embedding cancels any multiplier.
    attached(
        "granite",
        "Granite 3",
        "Granite",
        trunk=TrunkTraits(logit_divisor=lambda config: config["logits_scaling"]),
        engines=_UNSCALED,
    ),
    attached(
        "smollm3",
        "SmolLM3",
        "SmolLM3",
        # transformers builds the head from the first layer's fields. The trunk's last layer may have no positions.
        config=lambda config, num_modules: layouts.full(
            layouts.with_layers(config, num_modules, no_rope_layers=[1] * num_modules), num_modules
        ),
        trunk=TrunkTraits(layer_kinds="no_rope_layers"),
    ),
    attached("glm4", "GLM-4 dense", "Glm4"),
    attached(
        "seed_oss",
        "Seed-OSS",
        "SeedOss",
        config=layouts.layers_of(sliding_window=None, attention_dropout=0.0, residual_dropout=0.0),
        engines=transformers_only(
            remarked(
                _USE_MTP_TOLD, ", with the config's dropout: set attention_dropout and residual_dropout to 0 first"
            )
        ),
    ),
    attached("exaone4", "EXAONE 4", "Exaone4"),
    # Queries and keys are normed after the rotation, so absolute positions matter: they have to equal transformers'.
    attached(
        "hunyuan_v1_dense",
        "Hunyuan dense",
        "HunYuanDenseV1",
        wiring=Wiring(default=Convention(position_offset=1)),
    ),
    attached(
        "cohere",
        "Command R",
        "Cohere",
        trunk=_SCALED_LOGITS,
        engines=_OURS_ONLY,
    ),
    attached(
        "cohere2",
        "Command R7B / A",
        "Cohere2",
        trunk=_SCALED_LOGITS,
        engines=_OURS_ONLY,
    ),
    attached(
        "cohere2_moe",
        "Command A+ / North",
        "Cohere2Moe",
        declaration=Declaration(),
        keys=EXPERTS_AFTER_THE_TRUNK,
        wiring=Wiring(conventions={"llama.cpp": Convention()}),
        layer=HeadLayer("cohere2_moe", "Cohere2Moe", config=layouts.sparse_full, prepare=_always_rotate),
        trunk=_SCALED_LOGITS,
        engines={
            "vllm": no("has no head for this model, and refuses a checkpoint with a layer after the trunk's last"),
            "sglang": no("has no head for this model; it loads the trunk and leaves the head's layer out"),
        },
    ),
)
"""In the order in which tables list them."""
