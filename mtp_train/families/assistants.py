"""External drafters that come as checkpoints of their own and live on their trunk's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from transformers import PretrainedConfig

from mtp_train.families.engines import EngineSupport, engine_table
from mtp_train.families.spec import RawConfig, raw_text_config


@dataclass(frozen=True, kw_only=True)
class Assistant:
    """One kind of external drafter. It has no head to put back: it is served beside its trunk as it is."""

    name: str
    title: str
    """How people call it, for tables and messages."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` in the whole config; that of its text config names the trunk's kind of layer."""
    trunk_title: str
    """How people call the trunks that it drafts for."""
    trunk_hidden_size: str
    """Field of the config with the hidden size of its trunk."""
    engines: Mapping[str, EngineSupport]
    """As a family's, with ``{path}`` for the assistant."""
    refusals: Callable[[RawConfig], Mapping[str, str]] = lambda config: {}
    """Engines that refuse this config of the kind, with the reason."""
    building: Callable[[PretrainedConfig], AbstractContextManager[None]] = lambda text_config: nullcontext()
    """What must hold while transformers builds the model of this text config."""


def _refusals(config: RawConfig) -> Mapping[str, str]:
    size = config.get("backbone_hidden_size")
    if size != raw_text_config(config).get("hidden_size"):
        return {}
    return {"llama.cpp": f"its loader refuses an assistant as wide as its trunk (hidden size {size})"}


@contextmanager
def _all_layers_share(text_config: PretrainedConfig) -> Iterator[None]:
    """Let a model be built of which no layer has keys of its own: transformers 5.23.0 refuses its own assistants."""
    config_class, name = type(text_config), "kv_sharing_modes"
    stock = vars(config_class).get(name)
    setattr(config_class, name, property(lambda config: ["reuse"] * config.num_hidden_layers))
    try:
        yield
    finally:
        if stock is None:
            delattr(config_class, name)
        else:
            setattr(config_class, name, stock)


GEMMA4_ASSISTANT = Assistant(
    name="gemma4_assistant",
    title="Gemma 4 assistant",
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    trunk_title="Gemma 4",
    trunk_hidden_size="backbone_hidden_size",
    engines=engine_table(
        vllm=EngineSupport(True, "vllm serve TRUNK --speculative-config {vllm_config}"),
        sglang=EngineSupport(
            True,
            "python -m sglang.launch_server --model-path TRUNK --speculative-algorithm NEXTN "
            "--speculative-draft-model-path {path} --speculative-num-steps {depth} --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens {depth_plus_1}",
        ),
        llama_cpp=EngineSupport(
            True,
            "python convert_hf_to_gguf.py {path} --outfile assistant.gguf && "
            "llama-server -m TRUNK.gguf -md assistant.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
        ),
        transformers=EngineSupport(
            True,
            "model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained({python_path})): batch 1; "
            "release 5.23.0 fails to build its own class for it, 5.19 builds it",
        ),
    ),
    refusals=_refusals,
    building=_all_layers_share,
)
ASSISTANTS: tuple[Assistant, ...] = (GEMMA4_ASSISTANT,)


def assistant_for(config: RawConfig) -> Assistant | None:
    """Return the record that claims a raw ``config.json``, None where it is no assistant's."""
    model_type = config.get("model_type")
    return next((one for one in ASSISTANTS if model_type in one.model_types), None)
