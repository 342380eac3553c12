"""Families whose heads are inspected, grafted and exported, but not run: their layers need what is not here yet."""

from __future__ import annotations

from mtp_train.families.engines import HEAD_IGNORED, USE_MTP, EngineSupport, engine_table, no
from mtp_train.families.spec import LLAMA_CPP_POSITIONS, Convention, CountField, Family, KeyRule, SharedKey

_V4 = "mtp.{module}."
DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    title="DeepSeek V4",
    model_types=("deepseek_v4",),
    count=CountField(name="num_nextn_predict_layers"),
    head_config_fields=("num_nextn_predict_layers",),
    trunk_prefixes=("model.", ""),
    embed_key="{trunk}embed.weight",
    head_prefixes=("mtp.",),
    key_rules=(
        KeyRule(native=f"{_V4}e_proj.weight", ours="embed_proj.weight"),
        KeyRule(native=f"{_V4}h_proj.weight", ours="hidden_proj.weight"),
        KeyRule(native=f"{_V4}enorm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_V4}hnorm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_V4}norm.weight", ours="final_norm.weight"),
        KeyRule(native=f"{_V4}{{rest}}", ours="layer.{rest}"),
    ),
    shared_keys=(
        SharedKey(native=f"{_V4}emb.tok_emb.weight", trunk="{trunk}embed.weight", tied_trunk="{trunk}embed.weight"),
        SharedKey(native=f"{_V4}head.weight", trunk="{trunk}head.weight", tied_trunk="{trunk}embed.weight"),
    ),
    default=Convention(zero_first_embedding=True),
    conventions={
        "vllm": Convention(zero_first_embedding=True),
        "sglang": Convention(),
        "llama.cpp": LLAMA_CPP_POSITIONS,
    },
    why_not_run="its head reads the trunk's hyper-connection streams before they are mixed",
    engines=engine_table(
        transformers=HEAD_IGNORED,
        llama_cpp=EngineSupport(
            True,
            "python convert_hf_to_gguf.py {path} --mtp --outfile mtp.gguf && llama-server -m model.gguf -md mtp.gguf "
            "--spec-type draft-mtp --spec-draft-n-max {depth}",
        ),
    ),
)

_INKLING = "model.mtp.layers.{module}."
INKLING = Family(
    name="inkling",
    title="Inkling",
    model_types=("inkling_text",),
    count=CountField(name="num_nextn_predict_layers", section="mtp_config"),
    head_config_fields=(),
    trunk_prefixes=("model.llm.", "model."),
    embed_key="{trunk}embed.weight",
    head_prefixes=("model.mtp.",),
    key_rules=(
        KeyRule(native=f"{_INKLING}input_proj.weight", ours="proj.weight"),
        KeyRule(native=f"{_INKLING}embed_norm.weight", ours="embed_norm.weight"),
        KeyRule(native=f"{_INKLING}hidden_norm.weight", ours="hidden_norm.weight"),
        KeyRule(native=f"{_INKLING}transformer_block.{{rest}}", ours="layer.{rest}"),
        KeyRule(native="model.mtp.chain_norm.weight", ours="final_norm.weight", optional=True),
    ),
    concat="hidden_first",
    final_norm=False,
    default=Convention(),
    conventions={"vllm": Convention(), "sglang": Convention()},
    why_not_run="its modules keep convolution states and a norm in common, which our head does not have",
    engines=engine_table(transformers=USE_MTP, llama_cpp=no("has no graph for this model")),
)

WEIGHTS_ONLY = (DEEPSEEK_V4, INKLING)
