"""Trunks whose releases carry no head: where an attached one is kept, and who serves it.

A head is DeepSeek-V3's block (arXiv:2412.19437, equations 21 to 23) around one decoder layer of the trunk's own class,
with full attention. It is kept as transformers' ``MtpModel`` reads it (``mtp.*``, ``num_mtp_layers``), which for
Qwen3-MoE is what SGLang reads; for Qwen2 as MiMo-7B has it, whose trunk that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import PretrainedConfig

from mtp_train.families.engines import EngineSupport, engine_table, no
from mtp_train.families.layouts import beside_the_trunk, expert_rules, with_layers
from mtp_train.families.mimo import MIMO
from mtp_train.families.spec import Borrowed, Convention, CountField, Engine, Family, KeyRule

# transformers' causal language models of these types name no head keys: the loaded model has to be told.
_USE_MTP_TOLD = EngineSupport(
    True,
    "once loaded, model._keys_to_ignore_on_load_unexpected = [r'^mtp\\.']; model.generate(..., use_mtp=True): batch 1, "
    "one draft a round",
    plain="model.generate(...)",
)
_NO_VLLM = no(
    "has no such head of its own for this model, and its transformers backend finds one by the keys that the model's "
    "class names, which transformers' own class does not"
)
_NO_SGLANG = no("has no head for this model")
_NO_LLAMA_CPP = no("has no graph for this head")
_TRANSFORMERS_ONLY = engine_table(transformers=_USE_MTP_TOLD, vllm=_NO_VLLM, sglang=_NO_SGLANG, llama_cpp=_NO_LLAMA_CPP)


def _full(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, layer_types=["full_attention"] * num_modules)


def _without_window(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, sliding_window=None)


def _sparse(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    return with_layers(text_config, num_modules, sliding_window=None, mlp_only_layers=[], decoder_sparse_step=1)


def _attached(
    model_type: str,
    title: str,
    *,
    classes: tuple[str, str],
    head_layer_config: Callable[[PretrainedConfig, int], PretrainedConfig] = _without_window,
    masks_by_layer_type: bool = False,
    rotary_by_layer_type: bool = False,
    logit_bound: str | None = None,
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
        logit_bound: As above.
        layer_rules: Rules for the layer's keys that are not called as in transformers.
        conventions: As above.
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
            norm=f"{beginning}RMSNorm",
            rotary=f"{beginning}RotaryEmbedding",
        ),
        masks_by_layer_type=masks_by_layer_type,
        rotary_by_layer_type=rotary_by_layer_type,
        logit_bound=logit_bound,
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
GEMMA3 = _attached(
    "gemma3_text",
    "Gemma 3 (text)",
    classes=("gemma3", "Gemma3"),
    head_layer_config=_full,
    masks_by_layer_type=True,
    rotary_by_layer_type=True,
    logit_bound="final_logit_softcapping",
)

ATTACHED: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, OLMO2, GEMMA3)
"""In the order in which tables show them."""
