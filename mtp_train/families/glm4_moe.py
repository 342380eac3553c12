"""GLM-4.5, 4.6 and 4.7: mixture-of-experts trunk, the head kept as one more layer after the trunk's."""

from __future__ import annotations

import copy

from transformers import PretrainedConfig

from mtp_train.families.engines import EngineSupport, engine_table
from mtp_train.families.spec import Borrowed, Convention, Family, KeyRule, SharedKey

# SGLang and llama.cpp recycle the state after shared_head.norm, vLLM the one before it and a zero first embedding.
_POST_NORM = Convention(recycle="after_final_norm", zero_first_embedding=False)
_VLLM = Convention(recycle="before_final_norm", zero_first_embedding=True)
_HEAD = "{trunk}layers.{layer}."


def _head_layer_config(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    config = copy.deepcopy(text_config)
    config.num_hidden_layers = num_modules
    # The head block is a mixture of experts also where the trunk's first layers are dense.
    config.first_k_dense_replace = 0
    return config


def _expert(part: str, ours: str, order: int = 0) -> KeyRule:
    return KeyRule(
        native=f"{_HEAD}mlp.experts.{{expert}}.{part}.weight",
        ours=f"layer.mlp.experts.{ours}",
        stack="experts_concat" if ours == "gate_up_proj" else "experts",
        order=order,
    )


GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5 / 4.6 / 4.7",
    model_types=("glm4_moe",),
    count_field="num_nextn_predict_layers",
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=(_HEAD,),
    key_rules=(
        KeyRule(native=f"{_HEAD}eh_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_HEAD}enorm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_HEAD}hnorm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_HEAD}shared_head.norm.weight", ours="final_norm.weight"),
        _expert("gate_proj", "gate_up_proj", 0),
        _expert("up_proj", "gate_up_proj", 1),
        _expert("down_proj", "down_proj"),
        KeyRule(native=f"{_HEAD}{{rest}}", ours="layer.{rest}"),
    ),
    shared_keys=(
        SharedKey(
            native=f"{_HEAD}embed_tokens.weight",
            trunk="{trunk}embed_tokens.weight",
            tied_trunk="{trunk}embed_tokens.weight",
        ),
        SharedKey(
            native=f"{_HEAD}shared_head.head.weight", trunk="lm_head.weight", tied_trunk="{trunk}embed_tokens.weight"
        ),
    ),
    default=_POST_NORM,
    conventions={"vllm": _VLLM, "sglang": _POST_NORM, "llama.cpp": _POST_NORM},
    head_layer_config=_head_layer_config,
    borrowed=Borrowed(
        python_module="transformers.models.glm4_moe.modeling_glm4_moe",
        layer="Glm4MoeDecoderLayer",
        norm="Glm4MoeRMSNorm",
        rotary="Glm4MoeRotaryEmbedding",
    ),
    engines=engine_table(
        transformers=EngineSupport(
            True, "model.generate(..., use_mtp=True): batch 1, one draft a round, trunks of 46 or 92 layers"
        )
    ),
)
