"""DeepSeek V3, R1 and V3.2: the head kept as one more layer after the trunk's, embedding and lm_head repeated."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from mtp_train.families.convention import LLAMA_CPP_POSITIONS, Convention
from mtp_train.families.engines import (
    HEAD_IGNORED,
    LLAMA_CPP,
    LLAMA_CPP_BESIDE,
    USE_MTP,
    EngineSupport,
    engine_table,
    no,
)
from mtp_train.families.layouts import (
    AFTER_THE_TRUNK,
    INDEXER,
    REPEATED_AFTER_THE_TRUNK,
    after_the_trunk,
    expert_rules,
    sparse_from_the_first,
    sparse_indexed,
    with_layers,
)
from mtp_train.families.mechanisms.compressed_keys import compressing_in_windows
from mtp_train.families.mechanisms.residual_streams import Streams
from mtp_train.families.spec import (
    Borrowed,
    Declaration,
    Engines,
    Family,
    HeadLayer,
    KeyRule,
    Keys,
    SharedKey,
    TrunkTraits,
    Wiring,
)

_KEY_RULES = after_the_trunk(*expert_rules(AFTER_THE_TRUNK))
_VLLM = Convention(zero_first_embedding=True)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek V3 / R1",
    model_types=("deepseek_v3",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=_KEY_RULES, shared=REPEATED_AFTER_THE_TRUNK),
    wiring=Wiring(conventions={"vllm": _VLLM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS}),
    layer=HeadLayer(
        config=sparse_from_the_first,
        borrowed=Borrowed(
            python_module="transformers.models.deepseek_v3.modeling_deepseek_v3",
            layer="DeepseekV3DecoderLayer",
            norm="DeepseekV3RMSNorm",
            rotary="DeepseekV3RotaryEmbedding",
        ),
    ),
    engines=Engines(
        # llama.cpp's converter drops the head, but its graph, which also serves GLM-4.7-Flash, loads it.
        support=engine_table(transformers=USE_MTP, llama_cpp=LLAMA_CPP_BESIDE),
    ),
)

DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    title="DeepSeek V3.2",
    model_types=("deepseek_v32",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(head_prefixes=(AFTER_THE_TRUNK,), rules=_KEY_RULES, shared=REPEATED_AFTER_THE_TRUNK),
    wiring=Wiring(
        # llama.cpp's head has no indexer: it attends to every key in texts longer than index_topk too.
        conventions={"vllm": _VLLM, "sglang": Convention(), "llama.cpp": LLAMA_CPP_POSITIONS},
    ),
    layer=HeadLayer(
        config=sparse_indexed,
        borrowed=Borrowed(
            python_module="transformers.models.deepseek_v32.modeling_deepseek_v32",
            layer="DeepseekV32DecoderLayer",
            norm="DeepseekV32RMSNorm",
            rotary="DeepseekV32RotaryEmbedding",
            frozen=INDEXER,
        ),
    ),
    trunk=TrunkTraits(masks_by_layer_type=True, needs_transformers="5.23"),
    engines=Engines(support=engine_table(transformers=HEAD_IGNORED)),
)

_MODULE, _TRUNK_LAYER = "mtp.{module}.", "{trunk}layers.{layer}."
_EXPERTS, _GATE_UP = f"{_MODULE}ffn.experts.", "layer.mlp.experts.gate_up_proj"
_LAYER_NAMES = {
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
_COMPRESSOR_NAMES = {
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
}
"""The same for matrices that only the trunk's layers have."""
_EXPERT_NAMES = {
    "w1": "mlp.experts.{expert}.gate_proj",
    "w2": "mlp.experts.{expert}.down_proj",
    "w3": "mlp.experts.{expert}.up_proj",
}
_SAVED_NAMES = {"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
# In all engines the head reads the streams before they are mixed, and recycles the streams of its layer.
_STREAMS = Convention(hidden="before_final_norm", recycle="before_final_norm")
_VLLM_V4 = Convention(hidden="before_final_norm", recycle="before_final_norm", zero_first_embedding=True)
_LLAMA_CPP = Convention(hidden="before_final_norm", recycle="before_final_norm", position_offset=1)


def _weights(layer: str, names: dict[str, str]) -> tuple[KeyRule, ...]:
    return tuple(
        KeyRule(native=f"{layer}{native}.weight", ours=f"layer.{ours}.weight") for native, ours in names.items()
    )


def _sliding(text_config: PretrainedConfig, num_modules: int) -> PretrainedConfig:
    """Return the config of vLLM's head layers: without compressed keys and without routing by token id."""
    return with_layers(
        text_config,
        num_modules,
        layer_types=["sliding_attention"] * num_modules,
        mlp_layer_types=["moe"] * num_modules,
    )


_ENGINES = engine_table(
    transformers=HEAD_IGNORED,
    llama_cpp=EngineSupport(
        True,
        "python convert_hf_to_gguf.py {path} --outfile model.gguf && "
        "python convert_hf_to_gguf.py {path} --mtp --outfile mtp.gguf && "
        "llama-server -m model.gguf -md mtp.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
        plain=LLAMA_CPP.plain,
    ),
)
_OTHER_NAMES = (
    "transformers saved it under names such as model.hc_head.hc_fn and attn.norm, for hc_head_fn and attn.kv_norm"
)
_TO_RELEASE = "Rename to a release's, and take its config.json"
_SAVED_BY_TRANSFORMERS = engine_table(
    transformers=HEAD_IGNORED,
    vllm=no(f"{_OTHER_NAMES}; its loader stops with a KeyError. {_TO_RELEASE}"),
    sglang=no(f"{_OTHER_NAMES}; its loader warns and leaves these weights as they began. {_TO_RELEASE}"),
    llama_cpp=no(f"{_OTHER_NAMES}; its converter stops. {_TO_RELEASE}"),
)
_TRUNK_NOT_IN_FP4 = engine_table(
    transformers=HEAD_IGNORED,
    llama_cpp=no(
        "its converter takes routed experts in FP4 alone, as releases have them; these are not. Beside a GGUF of this "
        "trunk from elsewhere it drafts with what mtp-train export --gguf writes"
    ),
)
_HEAD_NOT_IN_FP4 = engine_table(transformers=HEAD_IGNORED, llama_cpp=LLAMA_CPP_BESIDE)


def _engines_of(dtypes: Mapping[str, str]) -> Mapping[str, EngineSupport]:
    """Return the engines' entries for one checkpoint, since loaders depend on its key names and its experts' dtype."""
    if any(name in key for key in dtypes for name in _SAVED_NAMES):
        return _SAVED_BY_TRANSFORMERS
    experts = {key: dtype for key, dtype in dtypes.items() if ".experts." in key and key.endswith(".weight")}
    if {dtype for key, dtype in experts.items() if not key.startswith("mtp.")} != {"I8"}:
        return _TRUNK_NOT_IN_FP4
    return _ENGINES if set(experts.values()) == {"I8"} else _HEAD_NOT_IN_FP4


DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    title="DeepSeek V4",
    model_types=("deepseek_v4",),
    declaration=Declaration(count="num_nextn_predict_layers"),
    keys=Keys(
        # Releases have no prefix. transformers' save_pretrained adds one, and does not restore all release names.
        trunk_prefixes=("model.", ""),
        embed_by_prefix={"": "embed.weight"},
        lm_head="head.weight",
        saved_names=_SAVED_NAMES,
        head_prefixes=("mtp.",),
        rules=(
            KeyRule(native=f"{_MODULE}e_proj.weight", ours="token_proj.weight"),
            KeyRule(native=f"{_MODULE}h_proj.weight", ours="hidden_proj.weight"),
            KeyRule(native=f"{_MODULE}enorm.weight", ours="embed_norm.weight"),
            KeyRule(native=f"{_MODULE}hnorm.weight", ours="hidden_norm.weight"),
            KeyRule(native=f"{_MODULE}norm.weight", ours="final_norm.weight"),
            *(KeyRule(native=f"{_MODULE}hc_head_{one}", ours=f"mixer.hc_{one}") for one in ("fn", "base", "scale")),
            *(
                KeyRule(native=f"{_MODULE}hc_{part}_{one}", ours=f"layer.{part}_hc.{one}")
                for part in ("attn", "ffn")
                for one in ("fn", "base", "scale")
            ),
            KeyRule(native=f"{_MODULE}attn.attn_sink", ours="layer.self_attn.sinks"),
            KeyRule(native=f"{_MODULE}ffn.gate.bias", ours="layer.mlp.gate.e_score_correction_bias"),
            KeyRule(native=f"{_EXPERTS}{{expert}}.w1.weight", ours=_GATE_UP, stack="experts_concat", order=0),
            KeyRule(native=f"{_EXPERTS}{{expert}}.w3.weight", ours=_GATE_UP, stack="experts_concat", order=1),
            KeyRule(native=f"{_EXPERTS}{{expert}}.w2.weight", ours="layer.mlp.experts.down_proj", stack="experts"),
            KeyRule(native=f"{_EXPERTS}{{rest}}", ours="layer.mlp.experts.{rest}"),
            *_weights(_MODULE, _LAYER_NAMES),
        ),
        shared=(
            SharedKey(native=f"{_MODULE}emb.tok_emb.weight", trunk="embed.weight"),
            SharedKey(native=f"{_MODULE}head.weight", trunk="head.weight"),
        ),
        trunk_rules=(
            *_weights(_TRUNK_LAYER, _LAYER_NAMES | _COMPRESSOR_NAMES),
            *_weights(f"{_TRUNK_LAYER}ffn.experts.{{expert}}.", _EXPERT_NAMES),
        ),
    ),
    wiring=Wiring(
        concat="sum",
        default=_VLLM_V4,
        conventions={"vllm": _VLLM_V4, "sglang": _STREAMS, "llama.cpp": _LLAMA_CPP},
    ),
    layer=HeadLayer(
        config=_sliding,
        borrowed=Borrowed(
            python_module="transformers.models.deepseek_v4.modeling_deepseek_v4",
            layer="DeepseekV4DecoderLayer",
            norm="DeepseekV4RMSNorm",
            rotary="DeepseekV4RotaryEmbedding",
        ),
        rotary_kind="main",
    ),
    trunk=TrunkTraits(
        streams=Streams(count="hc_mult", mixer="DeepseekV4HyperHead", trunk_mixer="hc_head"),
        running_windows=compressing_in_windows,
    ),
    engines=Engines(support=_ENGINES, of_checkpoint=_engines_of),
)
