"""The record that says everything the rest of the package may know about a model family.

Nothing outside ``families/`` names a model. ``CONTRIBUTING.md`` says how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.convention import Convention
from mtp_train.families.engines import EngineSupport
from mtp_train.families.streams import Streams

Engine = Literal["vllm", "sglang", "llama.cpp"]
HeadKind = Literal["mtp", "eagle", "eagle3", "medusa"]
RawConfig = Mapping[str, Any]


def raw_text_config(config: RawConfig) -> RawConfig:
    """Return the language model's part of a raw ``config.json``: ``text_config`` where there is one."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


@dataclass(frozen=True, kw_only=True)
class KeyRule:
    """Map one native weight key, or a family of keys, to ours.

    Placeholders in ``native``: ``{trunk}`` the decoder's prefix (``model.`` or ``model.language_model.``), ``{module}``
    the head module's number, ``{layer}`` the same counted after the trunk's layers, ``{expert}`` an expert's number,
    ``{sub}`` the number of a sublayer, ``{last}`` that of the last one, ``{rest}`` any tail. ``ours`` is relative to
    one head module and may use ``{sub}`` and ``{rest}``. The first rule that fits counts, in both directions.
    """

    native: str
    ours: str
    stack: Literal["none", "experts", "experts_concat", "concat"] = "none"
    """``experts``: one tensor per expert, stacked along a new first axis; a checkpoint that keeps its experts fused
    skips the rule. ``experts_concat``: the same, where several rules share ``ours`` and follow each other along the
    next axis (gate, then up). ``concat``: such rules for experts that the checkpoint itself stacks."""
    order: int = 0
    """Place among the rules that share ``ours`` under ``experts_concat`` and ``concat``."""
    optional: bool = False
    """Whether a head may be complete without the key. Read where the head cannot be built to compare with."""


@dataclass(frozen=True, kw_only=True)
class SharedKey:
    """A head key that repeats a trunk tensor: never trained, exported where the head's checkpoint had it."""

    native: str
    trunk: str
    """The trunk key it repeats, ``{trunk}`` allowed; the embedding where that key is absent, as in tied models."""


@dataclass(frozen=True, kw_only=True)
class Borrowed:
    """The classes of transformers that a head is built from, by name: importing a family imports no model."""

    python_module: str
    layer: str
    norm: str
    rotary: str | None
    """None for layers that know no positions."""
    norm_eps: str = "rms_norm_eps"
    """Field of the config with the norms' epsilon."""
    more_outputs: bool = False
    """Whether the layer returns a tuple whose first element is the state."""
    build_layer: Callable[[Borrowed, PretrainedConfig, int], nn.Module] | None = None
    """Makes the head's layer of this record, config and module number where it is not one ``layer`` as it is."""
    frozen: str | None = None
    """The layer's part that only chooses, and so gets no gradient: processes that train together wait for each one."""

    def cls(self, name: str) -> Any:
        """Return a class of the module by name."""
        return getattr(importlib.import_module(self.python_module), name)

    def make_layer(self, config: PretrainedConfig, layer_idx: int) -> nn.Module:
        """Build a decoder layer, randomly initialised."""
        if self.build_layer is not None:
            layer = self.build_layer(self, config, layer_idx)
        else:
            layer = self.cls(self.layer)(config, layer_idx)
        if self.frozen is not None:
            layer.get_submodule(self.frozen).requires_grad_(False)
        return layer

    def make_norm(self, config: PretrainedConfig, width: int | None = None) -> nn.Module:
        """Build a norm over the hidden size, or another width, at its identity."""
        eps = config.to_dict()[self.norm_eps]
        norm: nn.Module = self.cls(self.norm)(width or config.hidden_size, eps=eps)
        return norm

    def make_rotary(self, config: PretrainedConfig) -> nn.Module | None:
        """Build the rotary embedding, if there is one."""
        return None if self.rotary is None else self.cls(self.rotary)(config=config)


@dataclass(frozen=True, kw_only=True)
class TrunkClass:
    """The transformers classes that fit a trunk whose own model type transformers does not know."""

    model_type: str
    """The other model's type; its config class reads the checkpoint's config."""
    wrapper: str | None = None
    """The model type of a wrapper, as which the checkpoint is saved: of it, ``model_type`` alone is loaded."""

    def config_class(self) -> type[PretrainedConfig]:
        """Return the config class."""
        found: type[PretrainedConfig] = CONFIG_MAPPING[self.model_type]
        return found

    def read_config(self, path: Path) -> PretrainedConfig:
        """Read the checkpoint's config, of a wrapper the language model's part."""
        if self.wrapper is None:
            return self.config_class().from_pretrained(path)
        text_config: PretrainedConfig = CONFIG_MAPPING[self.wrapper].from_pretrained(path).get_text_config()
        return text_config

    def model_class(self) -> Any:
        """Return the causal language model's class."""
        found = MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class()]
        if self.wrapper is not None:
            _load_from_wrapper(found, self.wrapper)
        return found


def _load_from_wrapper(language_model: Any, wrapper: str) -> None:
    """Tell transformers how a wrapper's weights are called where its language model alone is loaded."""
    from transformers import conversion_mapping

    of_wrapper = conversion_mapping.get_checkpoint_conversion_mapping(wrapper)
    inside = conversion_mapping.WeightRenaming(r"model\.language_model\.", "model.")
    conversion_mapping.register_checkpoint_conversion_mapping(
        language_model.__name__, [*of_wrapper, inside], overwrite=True
    )


@dataclass(frozen=True, kw_only=True)
class RecurrentKernels:
    """What a recurrent layer calls in the borrowed module, so that the decoder can replace it in verify."""

    chunked: str
    """The rule, called for several tokens at once."""
    single: str
    """The rule, called for one token that continues a state."""
    conv: str
    """The causal convolution with its activation, called for several tokens at once."""
    rule: Literal["gated_delta", "kimi_delta", "mamba2"]


@dataclass(frozen=True, kw_only=True)
class CountField:
    """Where a config keeps the number of head modules."""

    name: str | None
    """Field of the text config; None where engines know the number and the config does not say it."""
    implied: int = 0
    """What engines take where the config does not say."""
    section: str | None = None
    """Section of the whole config that has the field, where it is not the text config."""
    repeated_as: str | None = None
    """Field of the text config in which transformers' own save says it once more."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of checkpoints that keep an MTP head in the same way."""

    name: str
    title: str
    """How people call it, for tables and messages."""
    kind: HeadKind = "mtp"
    """The head's architecture; records of other kinds are derived from a trunk's own, see ``drafts.py``."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` in the text config, or a wrapper's whose text config could be another family's."""
    count: CountField
    head_config_fields: tuple[str, ...]
    """Every field of the text config that describes the head, the count included; a graft brings them along."""
    declared_beside: Mapping[str, Any] = field(default_factory=dict)
    """What the text config says of a head besides its count, the same for all."""
    attached: bool = False
    """Whether releases carry no head, so that there is one only where it was attached."""
    wrapper: str | None = None
    """Model type of the vision-language model around such a trunk; see ``wrappers.py``."""
    trunk_prefixes: tuple[str, ...]
    """Decoder prefixes this family's checkpoints use, longest first."""
    embed_key: str = "{trunk}embed_tokens.weight"
    """The trunk's input embedding, by which its prefix is told."""
    other_embed_keys: Mapping[str, str] = field(default_factory=dict)
    """The same under prefixes where it is called otherwise."""
    lm_head_key: str = "lm_head.weight"
    """The trunk's lm_head, where it is stored."""
    saved_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of trunk keys that transformers' own save leaves otherwise than a release has them: its words to those."""
    embed_norm_key: str | None = None
    """The norm that the trunk's embedding ends with: a head on its own reads it too."""
    head_prefixes: tuple[str, ...]
    """Every key under one of these belongs to the head (placeholders as in KeyRule)."""
    key_rules: tuple[KeyRule, ...]
    shared_keys: tuple[SharedKey, ...] = ()
    trunk_rules: tuple[KeyRule, ...] = ()
    """Parts of the trunk's layers that a release calls otherwise than transformers (``{layer}`` is the layer's own
    number), where the head's rules do not say so already. An adapter's modules are found by them."""
    wrapper_names: Mapping[str, str] = field(default_factory=dict)
    """What parts of the wrapper beside the language model are called in transformers, ``model.`` left out, and in a
    release where that differs: beginnings of names. An adapter's modules are found by them."""
    num_sublayers: Callable[[RawConfig], int] = lambda config: 1
    """Numbered sublayers of one head module, from the raw text config."""
    concat: Literal["embed_first", "hidden_first", "sum"] = "embed_first"
    """Order of the two normed halves that ``proj`` reads; ``sum``: each has its own projection, and these add up."""
    final_norm: bool = True
    """Whether a norm stands between the head's layer and the lm_head."""
    chain_norm: str | None = None
    """Field of the text config that says whether one norm, which the first module has here, follows every module."""
    own_lm_head: bool = False
    """Whether each head module has an lm_head of its own, frozen here like the trunk's."""
    own_embedding: bool = False
    """Whether the head's modules read an embedding of their own, which the first one has here, frozen."""
    default: Convention
    conventions: Mapping[Engine, Convention]
    head_layer_config: Callable[[PretrainedConfig, int], PretrainedConfig] = lambda config, num_modules: config
    """Text config and module count to the config that the borrowed decoder layers are built from."""
    trunk_layers: Callable[[PretrainedConfig], tuple[int, ...]] = lambda config: ()
    """The text config to the trunk's layers whose input the head reads, where it reads more than the last state."""
    borrowed: Borrowed | None = None
    """None where the head cannot be run here, only its weights be handled; ``why_not_run`` then says why."""
    why_not_run: str | None = None
    needs_transformers: str | None = None
    """The release from which transformers runs the trunk as it is called here; None for all that are allowed."""
    rotary_axes: int = 1
    """Rows of positions the rotary embedding takes: 3 where it counts time, height and width (all equal for text)."""
    rotary_by_layer_type: bool = False
    """Whether the rotary embedding is told the type of the layer it is for."""
    rotary_kind: str | None = None
    """What the layer and the rotary embedding call the one for the head, where they have several."""
    masks_by_layer_type: bool = False
    """Whether the trunk takes ready masks as a mapping from layer type, as transformers' mixed trunks do."""
    layer_kinds: str = "layer_types"
    """Field of the text config with the kind of each layer, by which the one for the head to copy is found."""
    masks_of_distances: bool = False
    """Whether the head's layers take masks that say how far away each key is; see ``relative.py``."""
    trunk_class: TrunkClass | None = None
    """The classes that load the trunk, where transformers does not know the model type or would load more."""
    only_with_vision: bool = False
    """Whether transformers has the trunk only inside of its vision-language model, which is then loaded whole."""
    trunk_final_norm: str | None = "norm"
    """The decoder's final norm, by attribute; None where a mixer of streams ends it."""
    streams: Streams | None = None
    """None where the trunk has one residual stream, or the head reads them mixed."""
    running_windows: Callable[[], AbstractContextManager[None]] = nullcontext
    """What the trunk's layers need around a forward over windows (rows at different positions, our own cache)."""
    loading: Callable[[Collection[str]], AbstractContextManager[None]] | None = None
    """What transformers needs around loading the trunk of a checkpoint with these keys, None for nothing."""
    prepare_trunk: Callable[[nn.Module], None] = lambda decoder: None
    """Done once to a loaded decoder: what its layers leave out that windows of several rows need, or do too much."""
    logit_divisor: Callable[[RawConfig], float] | None = None
    """Raw text config to what states are divided by before the lm_head reads them."""
    real_vocab: str | None = None
    """Field of the text config with how many rows of the lm_head stand for tokens; the rest is padding."""
    logit_bound: str | None = None
    """Field of the text config with the c of ``c tanh(logits / c)``, where the trunk bounds its logits so."""
    engines: Mapping[str, EngineSupport]
    engines_of: Callable[[Mapping[str, str]], Mapping[str, EngineSupport]] | None = None
    """The same for one checkpoint, from its keys and their safetensors dtypes, where loaders do not take all."""
    recurrent: RecurrentKernels | None = None

    @property
    def classes(self) -> Borrowed:
        """The classes to build the head from.

        Raises:
            UnsupportedModelError: The head cannot be run here, or not with this transformers.
        """
        needed = self.needs_transformers
        if needed is not None and Version(transformers.__version__) < Version(needed):
            raise UnsupportedModelError(
                f"head: to run that of {self.title} takes transformers {needed} or later; found "
                f"{transformers.__version__}. Install a newer one; inspect, graft and export work with this one."
            )
        if self.borrowed is None:
            raise UnsupportedModelError(
                f"head: that of {self.title} cannot be run here ({self.why_not_run}); expected a family that can. "
                "inspect, graft and export work without running it."
            )
        return self.borrowed

    @property
    def follows_the_trunk(self) -> bool:
        """Whether the head's keys are numbered after the trunk's layers."""
        return any("{layer}" in prefix for prefix in self.head_prefixes)

    @property
    def reads_before_norm(self) -> bool:
        """Whether any wiring of the head reads the trunk before its final norm."""
        return any(one.hidden == "before_final_norm" for one in (self.default, *self.conventions.values()))

    def embedding(self, trunk_prefix: str) -> str:
        """Return the key of the trunk's input embedding in a checkpoint with this prefix."""
        return self.other_embed_keys.get(trunk_prefix, self.embed_key).format(trunk=trunk_prefix)

    def state_width(self, text_config: PretrainedConfig) -> int:
        """Return the width of the states that the head reads and recycles."""
        count = 1 if self.streams is None else text_config.to_dict()[self.streams.count]
        return int(count * text_config.hidden_size)

    def has_chain_norm(self, text_config: PretrainedConfig) -> bool:
        """Whether one norm follows every module."""
        return self.chain_norm is not None and bool(text_config.to_dict()[self.chain_norm])

    def divisor(self, text_config: PretrainedConfig) -> float | None:
        """Return what states are divided by before the lm_head reads them, None for nothing."""
        return None if self.logit_divisor is None else float(self.logit_divisor(text_config.to_dict()))

    def engines_for(self, dtypes: Mapping[str, str]) -> Mapping[str, EngineSupport]:
        """Return what engines take of one checkpoint, by its keys and their safetensors dtypes."""
        return self.engines if self.engines_of is None else self.engines_of(dtypes)

    def convention(self, name: str) -> Convention:
        """Return the wiring for ``auto`` (this family's default) or for an engine.

        Raises:
            UnsupportedModelError: The engine is unknown for this family.
        """
        if name == "auto":
            return self.default
        for engine, convention in self.conventions.items():
            if engine == name:
                return convention
        known = ", ".join(["auto", *self.conventions])
        raise UnsupportedModelError(
            f"head.convention: '{name}'; expected one of {known} for {self.title}. Use auto unless you serve elsewhere."
        )

    def count_as_field(self, num_modules: int) -> dict[str, Any]:
        """Return the text-config fields that declare so many modules; none where it has no such field."""
        if self.count.name is None or self.count.section:
            return {}
        return {self.count.name: num_modules, **self.declared_beside}

    def declaring(self, num_modules: int, config: RawConfig) -> dict[str, Any]:
        """Return what a raw config has to say of so many modules: fields of its text config, or its section, whole."""
        count = self.count
        if count.section is None or count.name is None:
            return self.count_as_field(num_modules)
        fields: dict[str, Any] = {count.section: {**(config.get(count.section) or {}), count.name: num_modules}}
        if count.repeated_as is not None and count.repeated_as in raw_text_config(config):
            fields[count.repeated_as] = num_modules
        return fields

    def declared_modules(self, config: RawConfig) -> int:
        """Return the number of head modules a raw config declares, what engines take where it says nothing."""
        field, section = self.count.name, self.count.section
        place = raw_text_config(config) if section is None else config.get(section) or {}
        return int(place.get(field, self.count.implied) or 0) if field is not None else self.count.implied
