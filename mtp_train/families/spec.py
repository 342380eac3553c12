"""The ``Family`` record: everything the rest of the package reads about a model family.

No module outside ``families/`` and ``gguf/`` names a model. ``README.md`` here describes how to add a family.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import transformers
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import Convention, Engines, EngineSupport, complete, use_mtp_named
from mtp_train.head_kinds import MTP, HeadKind
from mtp_train.upstream.transformers_private import listed_head_keys, load_from_wrapper

RawConfig = Mapping[str, Any]
"""A config, a part of one, or fields for one, as ``config.json`` has them."""
LayersConfig = Callable[[PretrainedConfig, int], PretrainedConfig]
"""Text config and number of modules to the config that a head's layers are built from."""


def raw_text_config(config: RawConfig) -> RawConfig:
    """Return the language model's part of a raw ``config.json``: ``text_config`` if it has one, else all of it."""
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def has_layer_types(config: PretrainedConfig) -> bool:
    """Return whether models of a config's class have several kinds of layers, and take an attention mask for each."""
    return hasattr(type(config), "layer_types") or "layer_types" in type(config).attribute_map


@dataclass(frozen=True, kw_only=True)
class KeyRule:
    """Map a native tensor key, or a pattern of keys, to our key.

    Placeholders in ``native``:

    - ``{trunk}``: the decoder's prefix (``model.`` or ``model.language_model.``).
    - ``{module}``: the index of the head module; ``{layer}``: the same index counted after the trunk's layers.
    - ``{expert}``: the index of an expert.
    - ``{sub}``: the index of a sublayer; ``{last}``: the index of the last one.
    - ``{rest}``: any tail.

    ``ours`` is relative to one head module and may use ``{sub}`` and ``{rest}``. In both directions the first rule that
    matches applies. The tensors of several rules with one ``ours`` are concatenated along the rows, in the order of the
    rules (gate, then up).
    """

    native: str
    ours: str

    @property
    def for_each_expert(self) -> bool:
        """Whether ours stacks one native tensor per expert; not applied to a checkpoint that stores experts fused."""
        return "{expert}" in self.native and "{expert}" not in self.ours


_NORMS = {"rms_norm_eps": "RMSNorm", "layer_norm_epsilon": "RMSNorm", "layer_norm_eps": "LayerNorm"}
"""Name that a config gives the norms' epsilon, to the norms' class."""


@dataclass(frozen=True)
class HeadLayer:
    """The decoder layer inside each head module, and the norms and rotary embedding around it.

    All are transformers' classes, by name: importing a family imports no model code.
    """

    model: str
    """Directory of the model under ``transformers.models``."""
    prefix: str
    """The beginning of the names of its classes; the rest of two of them follows."""
    layer: str = "DecoderLayer"
    rotary: str | None = "RotaryEmbedding"
    """None if the layers take no position embeddings."""
    config: LayersConfig = lambda config, num_modules: config
    build_layer: Callable[[HeadLayer, PretrainedConfig, int], nn.Module] = lambda classes, config, layer_idx: (
        classes.stock_layer(config, layer_idx)
    )
    """Builds the head's layer from this record, the config and the module index; by default ``layer``."""
    prepare: Callable[[Any], object] = lambda layer: None
    """Called once on a built layer, to replace modules that are wrong for a head, or for windows of several rows."""
    frozen: str | None = None
    """Submodule of the layer that only selects keys and so gets no gradient. It is frozen, because distributed training
    waits for a gradient of every trainable parameter."""
    rotary_axes: int = 1
    """Rows of positions that the rotary embedding takes: 3 if it has time, height and width (all equal for text)."""
    rotary_kind: str | None = None
    """Name of the rotary embedding that the head's layer uses, if the trunk has several."""
    masks_of_distances: bool = False
    """Whether the layer takes masks with the distance of each key; see ``mechanisms/relative_positions.py``."""

    @property
    def python_module(self) -> str:
        return f"transformers.models.{self.model}.modeling_{self.model}"

    def cls(self, name: str) -> Any:
        """Return a class of the Python module by its whole name."""
        return getattr(importlib.import_module(self.python_module), name)

    def stock_layer(self, config: PretrainedConfig, layer_idx: int) -> Any:
        return self.cls(self.prefix + self.layer)(config, layer_idx)

    def make_layer(self, config: PretrainedConfig, layer_idx: int) -> nn.Module:
        layer = self.build_layer(self, config, layer_idx)
        self.prepare(layer)
        if self.frozen is not None:
            layer.get_submodule(self.frozen).requires_grad_(False)
        return layer

    def make_norm(self, config: PretrainedConfig, width: int | None = None) -> nn.Module:
        """Build a norm over ``width`` (default: the hidden size), initialised to the identity scale."""
        fields = config.to_dict()
        epsilon = next(name for name in _NORMS if fields.get(name) is not None)
        return self.cls(self.prefix + _NORMS[epsilon])(width or config.hidden_size, eps=fields[epsilon])


class TrunkClass(NamedTuple):
    """Another model's transformers classes, used to load a trunk whose own model type transformers lacks."""

    model_type: str
    """The other model's type. Its config class reads the checkpoint's config."""
    wrapper: str | None = None
    """Model type of the vision-language wrapper that the checkpoint is stored as. Only the language model of type
    ``model_type`` inside of it is loaded."""

    def model_class(self) -> Any:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[self.model_type]]
        if self.wrapper is not None:
            load_from_wrapper(found, self.wrapper)
        return found


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Parallel residual streams of a trunk (hyper-connections, arXiv:2512.24880), which its head reads unmixed.

    The states that the head reads and recycles are then the streams' concatenation.
    """

    count: str
    """Field of the text config with the number of streams."""
    mixer: str
    """Class of the model's Python module that mixes the streams into one state, in front of the final norm."""
    trunk_mixer: str
    """Attribute of the decoder with the trunk's mixer."""
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the mixer's class besides the config."""
    joined: bool = False
    """Whether layers, mixer and the head's norm of the state take the streams as one concatenated state."""


class RecurrentKernels(NamedTuple):
    """Names of the functions that a recurrent layer calls in its Python module; the decoder replaces them to verify.

    See ``mtp_inference/cache/recurrent.py``.
    """

    chunked: str
    """The state update over several tokens."""
    single: str
    """The state update over one token that continues a state."""
    rule: Literal["gated_delta", "kimi_delta", "mamba2"]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """How a ``config.json`` declares a head."""

    count: str | None = "num_nextn_predict_layers"
    """Field with the number of head modules. None if configs have no such field and engines hard-code the number."""
    implied: int = 0
    """Number of modules that engines assume if the config lacks the field."""
    section: str | None = None
    """Section of the whole config that contains ``count``. None: the text config contains it."""
    repeated_as: str | None = None
    """Field of the text config in which transformers' ``save_pretrained`` repeats the count."""
    others: tuple[str, ...] = ()
    """Further fields of the text config that describe the head; a graft copies them together with the count."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the text config of every checkpoint with a head has besides the count, with their values."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field of the text config that describes the head."""
        return self.others if self.count is None or self.section is not None else (self.count, *self.others)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Tensor keys of a checkpoint: prefixes, the head's key map, and the trunk's keys that the head needs."""

    trunk_prefixes: tuple[str, ...] = ("model.",)
    """Decoder prefixes that checkpoints of this family use, longest first."""
    head_prefixes: tuple[str, ...]
    """Every key under one of these belongs to the head (placeholders as in :class:`KeyRule`)."""
    rules: tuple[KeyRule, ...]
    """The head's key map. A head key without a rule is an error."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Head keys that repeat a trunk tensor, to the trunk's key (``{trunk}`` allowed). They are never trained, and
    exported only if the head's checkpoint had them. If a checkpoint lacks the trunk's key (tied weights), they repeat
    the embedding."""
    num_sublayers: Callable[[RawConfig], int] = lambda config: 1
    """Raw text config to the number of numbered sublayers in one head module."""
    embed: str = "{trunk}embed_tokens.weight"
    """The trunk's input embedding. Its presence identifies the prefix."""
    embed_by_prefix: Mapping[str, str] = field(default_factory=dict)
    """Prefix to the embedding's key, for prefixes under which it is not ``embed``."""
    embed_norm: str | None = None
    """Norm at the end of the trunk's embedding; a head that is loaded without its trunk reads it too."""
    lm_head: str = "lm_head.weight"
    """The trunk's lm_head in checkpoints that store one."""
    saved_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of trunk keys as transformers' ``save_pretrained`` writes them, to the same parts in a release."""
    trunk_rules: tuple[KeyRule, ...] = ()
    """Rules for parts of the trunk's layers that a release and transformers name differently, if ``rules`` does not
    cover them. ``{layer}`` is the layer's own index. Used to find the modules that an adapter changes."""
    wrapper_names: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of the wrapper's modules beside the language model: transformers' name, without ``model.``, to the name
    in a release. Used to find the modules that an adapter changes."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The computation around a head's decoder layer, and the conventions of engines."""

    concat: Literal["embed_first", "hidden_first", "sum"] = "embed_first"
    """Order of the two normed halves that ``proj`` reads. ``sum``: each half has its own projection, and both outputs
    are added."""
    final_norm: bool = True
    """Whether a norm stands between the head's layer and the lm_head."""
    chain_norm: str | None = None
    """Boolean field of the text config: whether one norm, stored in the first module, follows every module."""
    own_lm_head: bool = False
    """Whether each head module has its own lm_head, frozen in training like the trunk's."""
    own_embedding: bool = False
    """Whether the head's modules read their own embedding, stored in the first module and frozen in training."""
    trunk_layers: Callable[[PretrainedConfig], tuple[int, ...]] = lambda config: ()
    """Text config to the trunk layers whose input the head reads. Empty: the head reads the last hidden state."""
    default: Convention = field(default_factory=Convention)
    conventions: Mapping[str, Convention] = field(default_factory=dict)
    """Engine to its convention."""


@dataclass(frozen=True, kw_only=True)
class TrunkTraits:
    """How the trunk is loaded and run, and how it turns hidden states into logits."""

    needs_transformers: str | None = None
    """Oldest transformers release that runs the trunk as it is called here. None: every release that is allowed."""
    stand_in: TrunkClass | None = None
    """Classes that load the trunk, if transformers lacks the model type or would load more than the language model."""
    only_with_vision: bool = False
    """Whether transformers has the trunk only inside of a vision-language model, which is then loaded whole."""
    loading: Callable[[Collection[str]], AbstractContextManager[Any]] = nullcontext
    """Checkpoint keys to the context in which transformers loads the trunk."""
    prepare: Callable[[nn.Module], None] = lambda decoder: None
    """Called once on a loaded decoder, to replace modules that give wrong results for windows of several rows."""
    running_windows: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of every forward over windows (rows at different positions, with the decoder's own cache)."""
    layer_kinds: str = "layer_types"
    """Field of the text config with the kind of each layer. ``init: copy_last_layer`` copies the last layer of the
    head's kind."""
    streams: Streams | None = None
    """None if the trunk has one residual stream, or if the head reads the streams mixed into one."""
    final_norm: str | None = "norm"
    """Attribute of the decoder's final norm. None if a mixer of streams ends the decoder."""
    logit_divisor: Callable[[RawConfig], float] | None = None
    """Raw text config to the divisor of hidden states in front of the lm_head."""
    real_vocab: str | None = None
    """Field of the text config with the number of lm_head rows that are tokens; the remaining rows are padding."""
    recurrent: RecurrentKernels | None = None
    """None for trunks without recurrent layers."""
    key_shapes: Callable[[PretrainedConfig], Mapping[str, tuple[int, int]]] = lambda config: {}
    """Text config to the types of layers, each with the number of key heads and the width of a key or value in its last
    layer, which a head may attend to. transformers returns them as ``shared_kv_states``."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of checkpoints that store an MTP head in the same way."""

    name: str
    title: str
    """The name that tables and messages print."""
    kind: HeadKind = MTP
    """The kind of the head. ``kinds/`` derives the records of other kinds from a trunk's own record."""
    config_types: tuple[str, ...] = ()
    """``model_types``, where they are not the name alone."""
    attached: bool = False
    """Whether releases carry no head, so that a checkpoint has one only after it was attached."""
    wrapper: str | None = None
    """Model type of the vision-language model around such a trunk; see ``registry.WRAPPERS``."""
    declaration: Declaration = Declaration()
    keys: Keys
    wiring: Wiring = Wiring()
    layer: HeadLayer | None
    """None for a trunk without a head."""
    trunk: TrunkTraits = TrunkTraits()
    engines: Engines = field(default_factory=dict)
    """Engine to its support for the head, where it is not the default in ``engines.py``."""

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of ``model_type`` in the text config, or in a wrapper's config whose text part is another family's."""
        return self.config_types or (self.name,)

    @property
    def classes(self) -> HeadLayer:
        """The transformers classes to build the head from.

        Raises:
            UnsupportedModelError: The installed transformers lacks them, or the family has no head.
        """
        self.require_transformers()
        return self.require_layer()

    def require_layer(self) -> HeadLayer:
        """Return the head's layer; raise an UnsupportedModelError for a trunk without a head in its checkpoint."""
        if self.layer is None:
            raise UnsupportedModelError(
                f"head.kind: mtp for a trunk of {self.title}, whose releases carry no MTP head; expected its drafter, "
                "a checkpoint of its own: the assistant. Pass it to generate as --head, and to rescue as --from."
            )
        return self.layer

    def require_transformers(self) -> None:
        """Raise an UnsupportedModelError if the installed transformers is too old for the family's trunk."""
        found = transformers.__version__
        needed = self.trunk.needs_transformers
        if needed is not None and Version(found) < Version(needed):
            raise UnsupportedModelError(
                f"transformers: release {found}; expected {needed} or later, which {self.title} needs. Run pip install "
                f"'transformers>={needed}'."
            )

    @property
    def follows_the_trunk(self) -> bool:
        """Whether the head's keys are numbered after the trunk's layers."""
        return any("{layer}" in prefix for prefix in self.keys.head_prefixes)

    @property
    def reads_before_norm(self) -> bool:
        """Whether the head reads the hidden state before the trunk's final norm under any convention.

        The states of a trunk with residual streams are always those.
        """
        return self.trunk.streams is not None or any(
            one.hidden == "before_final_norm" for one in (self.wiring.default, *self.wiring.conventions.values())
        )

    @property
    def serving(self) -> dict[str, EngineSupport]:
        """Every engine with its support for the head."""
        return complete(self.engines)

    def embedding(self, trunk_prefix: str) -> str:
        """Return the key of the trunk's input embedding in a checkpoint with this prefix."""
        return self.keys.embed_by_prefix.get(trunk_prefix, self.keys.embed).format(trunk=trunk_prefix)

    def state_width(self, text_config: PretrainedConfig) -> int:
        """Return the width of the hidden states that the head reads and recycles."""
        streams = self.trunk.streams
        count = 1 if streams is None else text_config.to_dict()[streams.count]
        return count * text_config.hidden_size

    @property
    def reads_keys(self) -> bool:
        """Whether the head attends to the trunk's keys and values."""
        return self.wiring.default.hidden == "with_keys"

    def keys_width(self, text_config: PretrainedConfig) -> int:
        """Return the width of the keys and values that the trunk shows to a head, see ``Ends.show_to``."""
        return sum(2 * heads * width for heads, width in self.trunk.key_shapes(text_config).values())

    def vocab_size(self, text_config: PretrainedConfig) -> int:
        """Return the number of tokens, without rows that pad the output matrix."""
        return text_config.to_dict()[self.trunk.real_vocab or "vocab_size"]

    def has_chain_norm(self, text_config: PretrainedConfig) -> bool:
        """Return whether one norm follows every module."""
        return self.wiring.chain_norm is not None and text_config.to_dict()[self.wiring.chain_norm]

    def divisor(self, text_config: PretrainedConfig) -> float | None:
        """Return the divisor of hidden states in front of the lm_head, None if they are not divided."""
        return None if self.trunk.logit_divisor is None else self.trunk.logit_divisor(text_config.to_dict())

    def serving_of(self, config: RawConfig) -> dict[str, EngineSupport]:
        """Return every engine with its support for the head of a checkpoint with this config."""
        table = self.serving
        text_config = raw_text_config(config)
        first = text_config.get("num_hidden_layers")
        model_type = text_config.get("model_type")
        if not table["transformers"].supported or not self.follows_the_trunk or model_type not in CONFIG_MAPPING:
            return table
        # transformers lists the keys of a head for the numbers of layers that releases have.
        listed = listed_head_keys(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]])
        if isinstance(first, int) and not any(re.match(pattern, f"model.layers.{first}.") for pattern in listed):
            numbers = [str(first + module) for module in range(max(1, self.declared_modules(config)))]
            layers = numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"
            table["transformers"] = use_mtp_named(rf"^model\.layers\.{layers}\.")
        return table

    def convention(self, name: str) -> Convention:
        """Return the wiring for ``auto`` (this family's default) or for an engine."""
        known = {"auto": self.wiring.default, **self.wiring.conventions}
        if name not in known:
            raise UnsupportedModelError(
                f"head.convention: '{name}'; expected one of {', '.join(known)} for {self.title}. Use auto unless you "
                "serve elsewhere."
            )
        return known[name]

    def otherwise_wired(self, name: str) -> tuple[str, ...]:
        """Return the engines that wire the head otherwise than a convention: ``auto`` or an engine."""
        own = self.convention(name)
        return tuple(engine for engine, other in self.wiring.conventions.items() if other != own)

    def declaring(self, num_modules: int, config: RawConfig) -> dict[str, Any]:
        """Return the fields that make a raw config declare ``num_modules`` modules; none if configs have no count.

        They belong into the text config, or are the whole config's section with the count and the rest of its fields.
        """
        declared = self.declaration
        if declared.count is None:
            return {}
        if declared.section is None:
            return {declared.count: num_modules, **declared.beside}
        fields: dict[str, Any] = {
            declared.section: {**(config.get(declared.section) or {}), declared.count: num_modules}
        }
        if declared.repeated_as is not None and declared.repeated_as in raw_text_config(config):
            fields[declared.repeated_as] = num_modules
        return fields

    def conflicting_counts(self, config: RawConfig) -> str | None:
        """Return the declarations of a raw config, as a phrase, where they differ; None otherwise."""
        declared = self.declaration
        text_config = raw_text_config(config)
        places = {
            "": config,
            "text_config.": text_config,
            f"{declared.section}.": config.get(declared.section or "") or {},
        }
        found = {
            f"{place}{name}": fields[name]
            for place, fields in places.items()
            for name in (declared.count, declared.repeated_as)
            if name is not None and fields.get(name) is not None
        }
        return " and ".join(f"{at} = {number}" for at, number in found.items()) if len({*found.values()}) > 1 else None

    def declared_modules(self, config: RawConfig) -> int:
        """Return the number of head modules that a raw config declares, or that engines assume if it has no count."""
        declared = self.declaration
        place = raw_text_config(config) if declared.section is None else config.get(declared.section) or {}
        return int(place.get(declared.count or "", declared.implied) or 0)
