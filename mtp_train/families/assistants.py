"""External drafters: separate checkpoints whose attention reads the trunk's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from transformers import PretrainedConfig

from mtp_train.families.engines import Convention, EngineSupport, complete, engine_commands, no
from mtp_train.families.kinds.llama import in_sglang, in_vllm
from mtp_train.families.spec import Declaration, Family, Keys, RawConfig, TrunkTraits, Wiring, raw_text_config
from mtp_train.upstream.transformers_private import replacing


@dataclass(frozen=True, kw_only=True)
class Assistant:
    """One kind of external drafter: it has no head to put back and is served unchanged, beside its trunk."""

    name: str
    title: str
    """The name that tables and messages print."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` in the whole config. The text config's ``model_type`` names the trunk's layers."""
    trunk: Family
    """Record of the trunks that it drafts for, without a head."""
    trunk_hidden_size: str
    """Field of the config with the hidden size of its trunk."""
    support: Mapping[str, EngineSupport]
    """The engines' entries. In commands ``{path}`` is the assistant and TRUNK its trunk."""

    def commands(self, config: RawConfig, path: str, depth: int) -> dict[str, str]:
        """Return, per engine, the command that serves a trunk with this drafter, or why there is none."""
        size = config.get(self.trunk_hidden_size)
        commands = engine_commands(complete(self.support), path, depth)
        if size == raw_text_config(config).get("hidden_size"):
            commands["llama.cpp"] = f"no: its loader refuses an assistant with the hidden size of its trunk ({size})"
        return commands


def building_assistant(text_config: PretrainedConfig) -> AbstractContextManager[None]:
    """Allow building a model whose layers all reuse the trunk's keys; transformers 5.23.0 refuses such assistants."""
    if not hasattr(type(text_config), "kv_sharing_modes"):
        return nullcontext()
    every_layer = property(lambda config: ["reuse"] * config.num_hidden_layers)
    return replacing(type(text_config), kv_sharing_modes=every_layer)


def _key_shapes(text_config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    last = {kind: text_config.per_layer_config[index] for index, kind in enumerate(text_config.layer_types)}
    # Sorted: the first layers of a trunk and of its assistant may differ in type.
    return {kind: (last[kind].num_key_value_heads, last[kind].head_dim) for kind in sorted(last)}


_GEMMA4_TRUNK = Family(
    name="gemma4",
    title="Gemma 4",
    model_types=("gemma4_text", "gemma4_unified_text"),
    declaration=Declaration(count=None),
    keys=Keys(trunk_prefixes=("model.language_model.", "model."), head_prefixes=(), rules=()),
    layer=None,
    wiring=Wiring(default=Convention(hidden="with_keys")),
    trunk=TrunkTraits(key_shapes=_key_shapes),
    engines=dict.fromkeys(("vllm", "sglang", "llama.cpp", "transformers"), no("its releases carry no MTP head")),
)
GEMMA4_ASSISTANT = Assistant(
    name="gemma4_assistant",
    title="Gemma 4 assistant",
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    trunk=_GEMMA4_TRUNK,
    trunk_hidden_size="backbone_hidden_size",
    support={
        "vllm": in_vllm("config"),
        "sglang": in_sglang("NEXTN"),
        "llama.cpp": EngineSupport(
            True,
            "python convert_hf_to_gguf.py {path} --outfile assistant.gguf && "
            "llama-server -m TRUNK.gguf -md assistant.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
        ),
        "transformers": EngineSupport(
            True,
            "model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained({python_path})): batch 1; "
            "release 5.23.0 fails to build its own class for it, 5.19 builds it",
        ),
    },
)
ASSISTANTS: tuple[Assistant, ...] = (GEMMA4_ASSISTANT,)


def assistant_for(config: RawConfig) -> Assistant | None:
    """Return the record of an assistant's raw ``config.json``, or None if it is not an assistant's."""
    model_type = config.get("model_type")
    return next((one for one in ASSISTANTS if model_type in one.model_types), None)
