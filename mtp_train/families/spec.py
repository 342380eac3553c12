"""The record that says everything the rest of the package may know about a model family.

Nothing outside ``families/`` names a model. A family states where its head lives in a checkpoint, how the head is
wired, and which transformers classes it borrows; see ``CONTRIBUTING.md`` for how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import EngineSupport

Engine = Literal["vllm", "sglang", "llama.cpp"]
RawConfig = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class KeyRule:
    """Map one native weight key, or a family of keys, to ours.

    Placeholders in ``native``: ``{trunk}`` the decoder's prefix (``model.`` or ``model.language_model.``), ``{module}``
    the head module's number, ``{layer}`` the same counted after the trunk's layers, ``{expert}`` an expert's number,
    ``{rest}`` any tail. ``ours`` is relative to one head module and may use ``{rest}``.
    """

    native: str
    ours: str
    stack: Literal["none", "experts", "experts_concat"] = "none"
    """``experts``: one tensor per expert, stacked along a new first axis. ``experts_concat``: the same, where several
    rules share ``ours`` and follow each other along the next axis (gate, then up)."""
    order: int = 0
    """Place among the rules that share ``ours`` under ``experts_concat``."""


@dataclass(frozen=True, kw_only=True)
class SharedKey:
    """A head key that only repeats a trunk tensor: engines read the trunk's, so we never train it.

    It is written on export, from the trunk that is exported, when the checkpoint that gave the head had it.
    """

    native: str
    trunk: str
    """The trunk key it repeats, ``{trunk}`` allowed."""
    tied_trunk: str
    """The trunk key to read where ``trunk`` is absent because embedding and lm_head are tied."""


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How one engine wires the head where engines disagree."""

    recycle: Literal["after_final_norm", "before_final_norm"]
    """Which state of depth k is the hidden input of depth k + 1."""
    zero_first_embedding: bool
    """Whether the row at position 0 gets a zero embedding (before its norm)."""


@dataclass(frozen=True, kw_only=True)
class Borrowed:
    """The classes of transformers that a head is built from, by name: importing a family imports no model."""

    python_module: str
    layer: str
    norm: str
    rotary: str

    def _class(self, name: str) -> Any:
        return getattr(importlib.import_module(self.python_module), name)

    def make_layer(self, config: PretrainedConfig, layer_idx: int) -> nn.Module:
        """Build a decoder layer, randomly initialised."""
        layer: nn.Module = self._class(self.layer)(config, layer_idx)
        return layer

    def make_norm(self, config: PretrainedConfig) -> nn.Module:
        """Build a norm over the hidden size, at its identity."""
        norm: nn.Module = self._class(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        return norm

    def make_rotary(self, config: PretrainedConfig) -> nn.Module:
        """Build the rotary embedding."""
        rotary: nn.Module = self._class(self.rotary)(config=config)
        return rotary


@dataclass(frozen=True, kw_only=True)
class RecurrentKernels:
    """What a recurrent layer calls in the borrowed module, so that the decoder can replace it in verify."""

    chunked: str
    """The rule, called for several tokens at once."""
    single: str
    """The rule, called for one token that continues a state."""
    conv: str
    """The causal convolution with its activation, called for several tokens at once."""
    rule: Literal["gated_delta"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of checkpoints that keep an MTP head in the same way."""

    name: str
    title: str
    """How people call it, for tables and messages."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` in the text config."""
    count_field: str
    """Field of the text config that holds the number of head modules."""
    head_config_fields: tuple[str, ...]
    """Every field of the text config that describes the head, the count included; a graft brings them along."""
    trunk_prefixes: tuple[str, ...]
    """Decoder prefixes this family's checkpoints use, longest first."""
    head_prefixes: tuple[str, ...]
    """Every key under one of these belongs to the head (placeholders as in KeyRule)."""
    key_rules: tuple[KeyRule, ...]
    shared_keys: tuple[SharedKey, ...] = ()
    concat: Literal["embed_first", "hidden_first"] = "embed_first"
    """Order of the two normed halves that ``proj`` reads."""
    default: Convention
    conventions: Mapping[Engine, Convention]
    unroll: Literal["recursive", "chained"] = "recursive"
    """``recursive``: one module drafts every depth. ``chained``: depth k uses module k."""
    head_layer_config: Callable[[PretrainedConfig, int], PretrainedConfig]
    """Text config and module count to the config that the borrowed decoder layers are built from."""
    borrowed: Borrowed
    rotary_axes: int = 1
    """Rows of positions the rotary embedding takes: 3 where it counts time, height and width (all equal for text)."""
    masks_by_layer_type: bool = False
    """Whether the trunk takes ready masks as a mapping from layer type, as transformers' mixed trunks do."""
    engines: Mapping[str, EngineSupport]
    recurrent: RecurrentKernels | None = None

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

    def declared_modules(self, text_config: RawConfig) -> int:
        """Return the number of head modules a raw text config declares, 0 where it says nothing."""
        return int(text_config.get(self.count_field) or 0)
