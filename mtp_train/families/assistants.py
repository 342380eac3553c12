"""External drafters: separate checkpoints whose attention reads the trunk's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from transformers import PretrainedConfig

from mtp_train.families.drafts.llama import in_sglang, in_vllm
from mtp_train.families.engines import (
    EngineSupport,
    complete,
    engine_commands,
    engine_table,
    no,
)
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


@dataclass(frozen=True, kw_only=True)
class AssistantConvention:
    """Positions of an external drafter, as in transformers. All drafted tokens of a round have the same position.

    The drafter attends to the trunk's keys up to position t, the last token that the trunk has read.
    """

    position_offset: int
    """Added to t in the rotary embedding."""
    more_sliding_keys: int
    """Keys in a sliding layer that the drafter attends to beyond the size of the trunk's window, counted with t."""


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
    convention: AssistantConvention
    support: Mapping[str, EngineSupport]
    """Like ``Engines.support`` of a family. In commands ``{path}`` is the assistant and TRUNK its trunk."""
    refusals: Callable[[RawConfig], Mapping[str, str]] = lambda config: {}
    """Raw config to the engines that refuse it, with the reason."""
    building: Callable[[PretrainedConfig], AbstractContextManager[None]] = lambda text_config: nullcontext()
    """Text config to a context in which transformers builds the model."""

    @property
    def engines(self) -> dict[str, EngineSupport]:
        """Every engine with its support for the assistant."""
        return complete(self.support)

    def commands(self, config: RawConfig, path: str, depth: int) -> dict[str, str]:
        """Return, per engine, the command that serves a trunk with this drafter, or why there is none."""
        refused = {name: f"no: {why}" for name, why in self.refusals(config).items()}
        return engine_commands(self.engines, path, depth) | refused


def _refusals(config: RawConfig) -> Mapping[str, str]:
    size = config.get("backbone_hidden_size")
    if size != raw_text_config(config).get("hidden_size"):
        return {}
    return {"llama.cpp": f"its loader refuses an assistant with the hidden size of its trunk ({size})"}


@contextmanager
def _all_layers_share(text_config: PretrainedConfig) -> Iterator[None]:
    """Allow building a model whose layers all reuse the trunk's keys; transformers 5.23.0 refuses such assistants."""
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


_NO_HEAD = no("its releases carry no MTP head")
_GEMMA4_TRUNK = Family(
    name="gemma4",
    title="Gemma 4",
    model_types=("gemma4_text", "gemma4_unified_text"),
    declaration=Declaration(count=None),
    keys=Keys(trunk_prefixes=("model.language_model.", "model."), head_prefixes=(), rules=()),
    wiring=Wiring(conventions={}),
    layer=HeadLayer(),
    trunk=TrunkTraits(masks_by_layer_type=True),
    engines=engine_table(vllm=_NO_HEAD, sglang=_NO_HEAD, llama_cpp=_NO_HEAD, transformers=_NO_HEAD),
)
GEMMA4_ASSISTANT = Assistant(
    name="gemma4_assistant",
    title="Gemma 4 assistant",
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    trunk=_GEMMA4_TRUNK,
    trunk_hidden_size="backbone_hidden_size",
    support=engine_table(
        vllm=in_vllm("config"),
        sglang=in_sglang("NEXTN"),
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
    convention=AssistantConvention(position_offset=1, more_sliding_keys=1),
    refusals=_refusals,
    building=_all_layers_share,
)
ASSISTANTS: tuple[Assistant, ...] = (GEMMA4_ASSISTANT,)


def assistant_for(config: RawConfig) -> Assistant | None:
    """Return the record of an assistant's raw ``config.json``, or None if it is not an assistant's."""
    model_type = config.get("model_type")
    return next((one for one in ASSISTANTS if model_type in one.model_types), None)
