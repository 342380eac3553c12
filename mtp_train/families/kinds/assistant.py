"""Assistants: small decoders beside their trunk, whose attention reads the trunk's keys and values (Gemma 4's).

The layer is transformers' ``gemma4_assistant``; :mod:`mtp_train.heads.assistant` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from mtp_train.families.engines import Convention, Engines, EngineSupport, no
from mtp_train.families.kinds.kind import DraftFormat, DraftParts
from mtp_train.families.kinds.llama import in_sglang, in_vllm
from mtp_train.families.layouts import WRAPPED, key_rules
from mtp_train.families.spec import (
    Declaration,
    Family,
    HeadLayer,
    Keys,
    RawConfig,
    TrunkTraits,
    Wiring,
    raw_text_config,
)


def _key_shapes(text_config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    last = {kind: text_config.per_layer_config[index] for index, kind in enumerate(text_config.layer_types)}
    # Sorted: the first layers of a trunk and of its assistant may differ in type.
    return {kind: (last[kind].num_key_value_heads, last[kind].head_dim) for kind in sorted(last)}


GEMMA4 = Family(
    name="gemma4",
    title="Gemma 4",
    config_types=("gemma4_text", "gemma4_unified_text"),
    declaration=Declaration(count=None),
    keys=Keys(trunk_prefixes=WRAPPED, head_prefixes=(), rules=()),
    layer=None,
    trunk=TrunkTraits(key_shapes=_key_shapes),
    engines=dict.fromkeys(("vllm", "sglang", "llama.cpp", "transformers"), no("its releases carry no MTP head")),
)
"""The trunk, whose releases have no head in them."""


def _sizes(config: RawConfig, trunk: PretrainedConfig) -> dict[str, tuple[Any, Any]]:
    own = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config()
    return {
        "the hidden size of its trunk": (config.get("backbone_hidden_size"), trunk.hidden_size),
        "vocab_size": (own.vocab_size, trunk.vocab_size),
        "sliding_window": (own.sliding_window, trunk.sliding_window),
        "the number and width of key heads by type of layer": (_key_shapes(own), _key_shapes(trunk)),
    }


@dataclass(frozen=True, kw_only=True)
class AssistantParts(DraftParts):
    """An assistant, built from the config of its own checkpoint, which is written again as it is."""

    def described(self, family: Family, config: RawConfig) -> Family:
        whole = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        engines: Engines = family.engines
        size = config.get("backbone_hidden_size")
        if size == raw_text_config(config).get("hidden_size"):
            refused = no(f"its loader refuses an assistant with the hidden size of its trunk ({size})")
            engines = {**engines, "llama.cpp": refused}
        layer = replace(family.classes, config=lambda text_config, num_modules: whole)
        return replace(family, layer=layer, engines=engines)


ASSISTANT = AssistantParts(
    head="mtp_train.heads.assistant:assistant_head",
    only_trunk=GEMMA4,
    prefixes=("",),
    rules=key_rules("", {"{rest}": "{rest}"}),
    layer=HeadLayer("gemma4_assistant", "Gemma4Assistant"),
    wiring=Wiring(default=Convention(hidden="with_keys")),
    serving={
        "vllm": (in_vllm("config"), ("gemma4",)),
        "sglang": (in_sglang("NEXTN"), ("gemma4",)),
        "llama.cpp": (
            EngineSupport(
                True,
                "cp TRUNK/tokenizer*.json {path} && python convert_hf_to_gguf.py {path} --outfile assistant.gguf && "
                "llama-server -m TRUNK.gguf -md assistant.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
            ),
            ("gemma4",),
        ),
        "transformers": (
            EngineSupport(
                True,
                "model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained({python_path})): batch 1; "
                "release 5.23.0 fails to build its own class for it, 5.19 builds it",
            ),
            ("gemma4",),
        ),
    },
    other_trunks=no("is no trunk of an assistant"),
    other_engines=no("has no assistants"),
    format=DraftFormat(
        written_as=("Gemma4AssistantForCausalLM",),
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        trunk_size="backbone_hidden_size",
        has_output=False,
        depth_field="num_assistant_tokens",
        plain_settings={"tie_word_embeddings": (True,)},
        sizes=_sizes,
    ),
)
