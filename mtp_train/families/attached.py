"""Trunks whose releases carry no head: where an attached one is kept, and who serves it.

A head is DeepSeek-V3's block (arXiv:2412.19437, equations 21 to 23) around one decoder layer of the trunk's own class,
with full attention. It is kept as transformers' ``MtpModel`` reads it (``mtp.*``, ``num_mtp_layers``), which for
Qwen3-MoE is what SGLang reads; for Qwen2 as MiMo-7B has it, whose trunk that is; for Command A+ as llama.cpp reads it
(``cohere.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.families.cohere import COHERE2_MOE
from mtp_train.families.convention import Convention
from mtp_train.families.engines import EngineSupport, engine_table, no
from mtp_train.families.layouts import AFTER_THE_TRUNK, beside_the_trunk, expert_rules, with_layers
from mtp_train.families.longrope import keep_short_factors, short_factors
from mtp_train.families.mimo import MIMO
from mtp_train.families.spec import Borrowed, CountField, Engine, Family, KeyRule

# transformers' causal language models of these types name no head keys: the loaded model has to be told.
_USE_MTP_TOLD = EngineSupport(
    True,
    "once loaded, model._keys_to_ignore_on_load_unexpected = [r'^mtp\\.']; model.generate(..., use_mtp=True): batch 1, "
    "one draft a round",
    plain="model.generate(...)",
)
# transformers takes the lm_head's logits as they come.
_USE_MTP_UNSCALED = EngineSupport(
    True,
    f"{_USE_MTP_TOLD.text}; sampled drafts are drawn without the model's scale or bound of logits, fewer are accepted",
    plain=_USE_MTP_TOLD.plain,
)
_NO_VLLM = no(
    "has no such head of its own for this model, and its transformers backend finds one by the keys that the model's "
    "class names, which transformers' own class does not"
)
_NO_SGLANG = no("has no head for this model")
_NO_LLAMA_CPP = no("has no graph for this head")


def transformers_only(transformers: EngineSupport) -> Mapping[str, EngineSupport]:
    """Return the engines of a head that nobody but transformers may read."""
    return engine_table(transformers=transformers, vllm=_NO_VLLM, sglang=_NO_SGLANG, llama_cpp=_NO_LLAMA_CPP)


_TRANSFORMERS_ONLY = transformers_only(_USE_MTP_TOLD)
_UNSCALED = transformers_only(_USE_MTP_UNSCALED)
_OURS_ONLY = transformers_only(no("builds a head only where the config calls the norms' epsilon rms_norm_eps"))


def _full(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layer_types=["full_attention"] * num_modules)


def _without_window(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # Where the trunk has a window, transformers' head forgets what lies beyond it: its cache has the trunk's config.
    return with_layers(text_config, num_modules, sliding_window=None)


def _without_dropout(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return _without_window(
        with_layers(text_config, num_modules, attention_dropout=0.0, residual_dropout=0.0), num_modules
    )


def _sparse(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, sliding_window=None, mlp_only_layers=[], decoder_sparse_step=1)


def _sparse_full(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return _full(with_layers(text_config, num_modules, mlp_only_layers=[], decoder_sparse_step=1), num_modules)


def _rotated(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    # As transformers builds it, from the fields of the first layer: the trunk's last one may know no positions.
    return _full(with_layers(text_config, num_modules, no_rope_layers=[1] * num_modules), num_modules)


def _attached(
    model_type: str,
    title: str,
    *,
    classes: tuple[str, str],
    head_layer_config: Callable[[PretrainedConfig, int], PretrainedConfig] = _without_window,
    masks_by_layer_type: bool = False,
    rotary_by_layer_type: bool = False,
    norm: str = "RMSNorm",
    norm_eps: str = "rms_norm_eps",
    layer_rules: tuple[KeyRule, ...] = (),
    conventions: Mapping[Engine, Convention] | None = None,
    engines: Mapping[str, EngineSupport] = _TRANSFORMERS_ONLY,
) -> Family:
    """Return the record of a trunk whose head is kept in transformers' own layout.

    Args:
        model_type: The config's.
        title: See :class:`Family`.
        classes: transformers' module of models, and how the names of its classes begin.
        head_layer_config: See :class:`Family`, as all that follow.
        masks_by_layer_type: As above.
        rotary_by_layer_type: As above.
        norm: How the name of its norm ends.
        norm_eps: See :class:`Borrowed`.
        layer_rules: Rules for the layer's keys that are not called as in transformers.
        conventions: See :class:`Family`.
        engines: As above.
    """
    module, beginning = classes
    return Family(
        name=model_type,
        title=title,
        model_types=(model_type,),
        attached=True,
        count=CountField(name="num_mtp_layers"),
        # transformers asks for the kinds of a head's layers where the trunk's have several.
        declared_beside={"mtp_layer_types": ["full_attention"]},
        head_config_fields=("num_mtp_layers", "mtp_layer_types"),
        trunk_prefixes=("model.",),
        head_prefixes=("mtp.",),
        key_rules=beside_the_trunk(*layer_rules),
        default=Convention(),
        conventions=conventions or {},
        head_layer_config=head_layer_config,
        borrowed=Borrowed(
            python_module=f"transformers.models.{module}.modeling_{module}",
            layer=f"{beginning}DecoderLayer",
            norm=f"{beginning}{norm}",
            rotary=f"{beginning}RotaryEmbedding",
            norm_eps=norm_eps,
        ),
        masks_by_layer_type=masks_by_layer_type,
        rotary_by_layer_type=rotary_by_layer_type,
        engines=engines,
    )


# What makes vLLM and SGLang load it is the architecture's name; the model type stays, so that transformers still loads
# the trunk. vLLM reads the state before the trunk's final norm, SGLang the one after it.
_MIMO_IN_VLLM = MIMO.conventions["vllm"]
QWEN2 = Family(
    name="qwen2",
    title="Qwen2 / Qwen2.5",
    model_types=("qwen2",),
    attached=True,
    count=MIMO.count,
    declared_beside={"architectures": ["MiMoForCausalLM"]},
    head_config_fields=("num_nextn_predict_layers", "architectures"),
    trunk_prefixes=MIMO.trunk_prefixes,
    head_prefixes=MIMO.head_prefixes,
    key_rules=MIMO.key_rules,
    concat=MIMO.concat,
    default=_MIMO_IN_VLLM,
    conventions=MIMO.conventions,
    head_layer_config=_full,
    borrowed=MIMO.borrowed,
    masks_by_layer_type=True,
    engines=engine_table(
        transformers=no("loads the trunk and ignores the head"),
        llama_cpp=no("has no graph for this head; to convert the trunk, put Qwen2ForCausalLM back into config.json"),
    ),
)
LLAMA = _attached("llama", "Llama 2 / 3", classes=("llama", "Llama"))
MISTRAL = _attached("mistral", "Mistral", classes=("mistral", "Mistral"))
QWEN3 = _attached("qwen3", "Qwen3 dense", classes=("qwen3", "Qwen3"), head_layer_config=_full, masks_by_layer_type=True)
QWEN3_MOE = _attached(
    "qwen3_moe",
    "Qwen3 MoE",
    classes=("qwen3_moe", "Qwen3Moe"),
    head_layer_config=_sparse,
    layer_rules=expert_rules("mtp.layers.{module}."),
    conventions={"sglang": Convention()},
    engines=engine_table(transformers=_USE_MTP_TOLD, vllm=_NO_VLLM, llama_cpp=_NO_LLAMA_CPP),
)
OLMO2 = _attached("olmo2", "OLMo 2", classes=("olmo2", "Olmo2"))
GEMMA3 = replace(
    _attached(
        "gemma3_text",
        "Gemma 3 (text)",
        classes=("gemma3", "Gemma3"),
        head_layer_config=_full,
        masks_by_layer_type=True,
        rotary_by_layer_type=True,
    ),
    logit_bound="final_logit_softcapping",
)


def _keep_score_bounds(decoder: nn.Module) -> None:
    # transformers 5.17 still runs it with torch's fused attention, which knows nothing of the bound on scores.
    trunk: Any = decoder
    if trunk.config._attn_implementation == "sdpa":
        trunk.config._attn_implementation = "eager"


GEMMA2 = replace(
    _attached(
        "gemma2",
        "Gemma 2",
        classes=("gemma2", "Gemma2"),
        head_layer_config=_full,
        masks_by_layer_type=True,
        engines=_UNSCALED,
    ),
    logit_bound="final_logit_softcapping",
    prepare_trunk=_keep_score_bounds,
)
# Frequencies are fixed in the trunk and in the head, see longrope.py.
PHI3 = replace(
    _attached(
        "phi3",
        "Phi-3 / Phi-4",
        classes=("phi3", "Phi3"),
        head_layer_config=lambda config, num_modules: short_factors(_without_window(config, num_modules)),
    ),
    prepare_trunk=keep_short_factors,
)
GPT_OSS = _attached(
    "gpt_oss", "gpt-oss", classes=("gpt_oss", "GptOss"), head_layer_config=_full, masks_by_layer_type=True
)
OLMO3 = _attached(
    "olmo3",
    "OLMo 3",
    classes=("olmo3", "Olmo3"),
    head_layer_config=_full,
    masks_by_layer_type=True,
    rotary_by_layer_type=True,
)
# The head reads embeddings without their multiplier: its norm undoes any.
GRANITE = replace(
    _attached("granite", "Granite 3", classes=("granite", "Granite"), engines=_UNSCALED),
    logit_divisor=lambda config: config["logits_scaling"],
)
SMOLLM3 = replace(
    _attached(
        "smollm3",
        "SmolLM3",
        classes=("smollm3", "SmolLM3"),
        head_layer_config=_rotated,
        masks_by_layer_type=True,
    ),
    layer_kinds="no_rope_layers",
)


def _mixtral_layer(layer: str) -> tuple[KeyRule, ...]:
    """Return the rules of a layer with this native prefix."""
    native, experts = f"{layer}block_sparse_moe.", "layer.mlp.experts"
    return (
        *(
            KeyRule(
                native=f"{native}experts.{{expert}}.{name}.weight",
                ours=f"{experts}.gate_up_proj",
                stack="experts_concat",
                order=order,
            )
            for order, name in enumerate(("w1", "w3"))
        ),
        KeyRule(native=f"{native}experts.{{expert}}.w2.weight", ours=f"{experts}.down_proj", stack="experts"),
        KeyRule(native=f"{native}{{rest}}", ours="layer.mlp.{rest}"),
    )


MIXTRAL = replace(
    _attached("mixtral", "Mixtral", classes=("mixtral", "Mixtral"), layer_rules=_mixtral_layer("mtp.layers.{module}.")),
    trunk_rules=_mixtral_layer(AFTER_THE_TRUNK),
)
QWEN2_MOE = _attached(
    "qwen2_moe",
    "Qwen2 MoE",
    classes=("qwen2_moe", "Qwen2Moe"),
    head_layer_config=_sparse_full,
    masks_by_layer_type=True,
    layer_rules=expert_rules("mtp.layers.{module}."),
)
# Queries are scaled by their position in steps of thousands, and transformers has a row one position later: one row in
# a step differs.
MINISTRAL3 = _attached("ministral3", "Ministral 3 (text)", classes=("ministral3", "Ministral3"))
GLM4 = _attached("glm4", "GLM-4 dense", classes=("glm4", "Glm4"))
SEED_OSS = _attached(
    "seed_oss",
    "Seed-OSS",
    classes=("seed_oss", "SeedOss"),
    head_layer_config=_without_dropout,
    engines=transformers_only(
        EngineSupport(
            True,
            f"{_USE_MTP_TOLD.text}, with the config's dropout: set attention_dropout and residual_dropout to 0 first",
            plain=_USE_MTP_TOLD.plain,
        )
    ),
)
EXAONE4 = _attached(
    "exaone4", "EXAONE 4", classes=("exaone4", "Exaone4"), head_layer_config=_full, masks_by_layer_type=True
)
# Its norms of queries and keys come after their rotation: rows have to stand where transformers has them.
HUNYUAN_DENSE = replace(
    _attached("hunyuan_v1_dense", "Hunyuan dense", classes=("hunyuan_v1_dense", "HunYuanDenseV1")),
    default=Convention(position_offset=1),
)
COHERE = replace(
    _attached(
        "cohere",
        "Command R",
        classes=("cohere", "Cohere"),
        norm="LayerNorm",
        norm_eps="layer_norm_eps",
        engines=_OURS_ONLY,
    ),
    logit_divisor=lambda config: 1.0 / config["logit_scale"],
)
COHERE2 = replace(
    _attached(
        "cohere2",
        "Command R7B / A",
        classes=("cohere2", "Cohere2"),
        head_layer_config=_full,
        masks_by_layer_type=True,
        norm="LayerNorm",
        norm_eps="layer_norm_eps",
        engines=_OURS_ONLY,
    ),
    logit_divisor=lambda config: 1.0 / config["logit_scale"],
)

ATTACHED: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, MINISTRAL3, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE),
    *(GEMMA2, GEMMA3, PHI3, GPT_OSS, OLMO2, OLMO3, GRANITE, SMOLLM3, GLM4, SEED_OSS, EXAONE4, HUNYUAN_DENSE),
    *(COHERE, COHERE2, COHERE2_MOE),
)
"""In the order in which tables show them."""
