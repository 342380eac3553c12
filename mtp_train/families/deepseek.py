"""DeepSeek V3, R1 and V3.2: the head kept as one more layer after the trunk's, embedding and lm_head repeated."""

from __future__ import annotations

from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import HEAD_IGNORED, LLAMA_CPP_BESIDE, USE_MTP, engine_table
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    INDEXER,
    REPEATED_AFTER_THE_TRUNK,
    after_the_trunk,
    expert_rules,
    sparse_from_the_first,
    sparse_indexed,
)
from mtp_train.families.spec import Borrowed, CountField, Family

_KEY_RULES = after_the_trunk(*expert_rules(AFTER_THE_TRUNK))
_VLLM = Convention(zero_first_embedding=True)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek V3 / R1",
    model_types=("deepseek_v3",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=(AFTER_THE_TRUNK,),
    key_rules=_KEY_RULES,
    shared_keys=REPEATED_AFTER_THE_TRUNK,
    default=Convention(),
    conventions={"vllm": _VLLM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS},
    head_layer_config=sparse_from_the_first,
    borrowed=Borrowed(
        python_module="transformers.models.deepseek_v3.modeling_deepseek_v3",
        layer="DeepseekV3DecoderLayer",
        norm="DeepseekV3RMSNorm",
        rotary="DeepseekV3RotaryEmbedding",
    ),
    # llama.cpp's converter drops the head, but its graph, that of GLM-4.7-Flash too, takes it.
    engines=engine_table(transformers=USE_MTP, llama_cpp=LLAMA_CPP_BESIDE),
)

DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    title="DeepSeek V3.2",
    model_types=("deepseek_v32",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.",),
    head_prefixes=(AFTER_THE_TRUNK,),
    key_rules=_KEY_RULES,
    shared_keys=REPEATED_AFTER_THE_TRUNK,
    default=Convention(),
    # llama.cpp's head has no indexer: it reads every row of texts longer than index_topk too.
    conventions={"vllm": _VLLM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS},
    head_layer_config=sparse_indexed,
    borrowed=Borrowed(
        python_module="transformers.models.deepseek_v32.modeling_deepseek_v32",
        layer="DeepseekV32DecoderLayer",
        norm="DeepseekV32RMSNorm",
        rotary="DeepseekV32RotaryEmbedding",
        frozen=INDEXER,
    ),
    masks_by_layer_type=True,
    needs_transformers="5.23",
    engines=engine_table(transformers=HEAD_IGNORED),
)
