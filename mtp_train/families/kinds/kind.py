"""What a kind of head is: its module, and for heads in a file of their own how they are stored, wired and served.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import Engines, EngineSupport, complete
from mtp_train.families.spec import Declaration, Family, HeadLayer, KeyRule, RawConfig, Wiring
from mtp_train.head_kinds import SUGGESTED_DEPTH, HeadKind, find_head_kind, head_kinds


class Block(nn.Module):
    """One module of a head: the computation before its layer, the layer, and the computation after it."""

    layer: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.final_norm: nn.Module = nn.Identity()
        self.lm_head: nn.Module | None = None
        self.embedding: nn.Module | None = None

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return the hidden input of depth 1, computed from the trunk's states."""
        return trunk_BTD

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return the input of the layer, computed from the hidden state and the token's embedding."""
        raise NotImplementedError

    def finish(self, block: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the input of the lm_head and the state to recycle, both (B, T, D), from the layer's output."""
        return norm(block), block

    def project(self, state: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits of ``finish``'s first result, from the module's own lm_head or else from ``shared``."""
        return shared(state) if self.lm_head is None else self.lm_head(state)


def own_sizes(config: RawConfig, trunk: PretrainedConfig) -> Mapping[str, tuple[Any, Any]]:
    return {name: (config.get(name), getattr(trunk, name)) for name in ("hidden_size", "vocab_size")}


@dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """How a draft model is stored: its ``config.json``, and its tensors beside the head's own."""

    written_as: tuple[str, ...]
    """Values of ``architectures`` in the draft models that are written for engines. An engine uses the first that it
    supports."""
    read_as: tuple[str, ...] = ()
    """Further values that third parties write."""
    model_types: tuple[str, ...] = ()
    """Values of ``model_type`` that no other checkpoint has."""
    config: Callable[[PretrainedConfig, int, RawConfig, int | None], dict[str, Any]] | None = None
    """The layers' config, the number of modules, the trunk's raw text config and the number of tokens that may be
    drafted (None for all) to the ``config.json`` for engines, without architectures, dtype and vocab_size. None: the
    config is that of the checkpoint that the head started from."""
    trunk_size: str = "hidden_size"
    """Field of the draft model's config with the hidden size of its trunk."""
    sizes: Callable[[RawConfig, PretrainedConfig], Mapping[str, tuple[Any, Any]]] = own_sizes
    """The draft model's raw config and its trunk's text config to the values that have to be equal, by name."""
    modules_field: str | None = None
    """Field with the number of modules. None: there is one module."""
    drafted_field: str | None = None
    """Field with the number of rows of the draft model's output matrix; the vocabulary where the field is missing."""
    has_output: bool = True
    """Whether the draft model contains an output matrix. If not, engines use the trunk's lm_head."""
    draft_vocab: bool = False
    """Whether engines read a list of the tokens that may be drafted."""
    is_in_gguf: bool = False
    """Whether llama.cpp loads it, and ``checkpoints/gguf`` has its names there."""
    has_layer: bool = True
    """Whether its config describes the head's layer."""
    depth_field: str | None = None
    """Field of ``generation_config.json`` from which transformers reads the number of drafts; None: there is none."""
    plain_settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that change the forward, and the values with which it is the one implemented here, the usual first."""
    unread: tuple[str, ...] = ()
    """Beginnings of the keys of tensors that do not change which tokens are drafted, and are not read."""
    zeros: tuple[str, ...] = ()
    """Keys of vectors (D) of zeros that are written because an engine has random values where the file has none."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensor keys as the speculators package writes them, to the same prefixes in ``DraftParts.rules``."""

    def describes(self, config: RawConfig) -> bool:
        """Return whether a raw ``config.json`` is a draft model's of this format."""
        names = config.get("architectures") or []
        if config.get("model_type") in self.model_types or {*names} & {*self.written_as, *self.read_as}:
            return True
        # Releases of EAGLE-3's authors declare their trunk's class; no trunk has a draft vocabulary.
        return names == ["LlamaForCausalLM"] and self.drafted_field is not None and bool(config.get(self.drafted_field))


_SERVERS = ("vllm", "sglang", "llama.cpp")
"""Engines that serve draft models and count in the choice of a kind: transformers decodes one request at a time."""


@dataclass(frozen=True, kw_only=True)
class KindParts:
    """What a kind of head is made of. By itself: a head that its trunk's checkpoint has, and its family describes."""

    head: str = "mtp_train.heads.module:MtpHead"
    """``module:name`` of the function that builds the head, with the arguments of ``MtpHead``."""
    module: Callable[[Family, PretrainedConfig, int], Block] | None = None
    """The family's record, the config of the head's layers and the number of the module to the module of ``MtpHead``;
    None for another head."""
    format: DraftFormat | None = None
    """How the head is stored in a file of its own; None for a head in its trunk's checkpoint."""

    def on(self, trunk: Family, kind: HeadKind) -> Family:
        """Return the record of a trunk's family with such a head."""
        trunk.require_layer()
        return trunk

    def described(self, family: Family, config: RawConfig) -> Family:
        """Return the record of a head whose layer is the one that the config of its own file describes."""
        return family

    def most_drafts(self, config: RawConfig) -> int | None:
        """Return the largest number of drafts a round by the config of a draft model; None if it sets no limit."""
        return None

    def suggested_drafts(self, config: RawConfig) -> int:
        """Return the drafts a round of a head that no run has measured: a whole block, as engines draft one."""
        return self.most_drafts(config) or SUGGESTED_DEPTH

    def details(self, config: RawConfig) -> str:
        """Return what ``inspect`` adds to the title of a draft model, beginning with a comma; empty for nothing."""
        return ""


@dataclass(frozen=True, kw_only=True)
class DraftParts(KindParts):
    """The parts of a draft model, which shares the trunk's embedding and lm_head; these stay frozen."""

    format: DraftFormat
    prefixes: tuple[str, ...]
    """Every key of the draft model under one of these belongs to the head."""
    rules: tuple[KeyRule, ...]
    """The key map of the draft model."""
    layer: HeadLayer
    wiring: Wiring
    """Without conventions: every engine wires the head by the default."""
    serving: Mapping[str, tuple[EngineSupport, Collection[str]]]
    """Engine to its entry, and the trunks for which it holds: names of families, and model types of wrappers. In the
    commands ``{path}`` is the draft model and TRUNK its trunk."""
    other_trunks: EngineSupport
    """The entry of these engines for all other trunks."""
    other_engines: EngineSupport
    """The entry of the engines that are not in ``serving``."""
    only_trunk: Family | None = None
    """The family of the trunks, if there is one only. None: families whose releases have no head, and a few others."""

    def engines(self, trunk: str) -> Engines:
        """Return the engines' table.

        Args:
            trunk: The family's name, or the wrapper's model type for a trunk inside of a vision-language model.
        """
        served = {
            engine: one if trunk in trunks else self.other_trunks for engine, (one, trunks) in self.serving.items()
        }
        return complete({**dict.fromkeys((*_SERVERS, "transformers"), self.other_engines), **served})

    def on(self, trunk: Family, kind: HeadKind) -> Family:
        if self.only_trunk is not None and trunk.name != self.only_trunk.name:
            raise UnsupportedModelError(
                f"head.kind: {kind.name} for a trunk of {trunk.title}; expected {self.only_trunk.title} "
                f"({', '.join(self.only_trunk.model_types)}). Use the trunk that it was made for."
            )
        if self.only_trunk is None and not (trunk.attached or trunk.name in _BEYOND_ATTACHED):
            raise UnsupportedModelError(
                f"head.kind: {kind.name} for a trunk of {trunk.title}; expected a family whose releases carry no head, "
                "or Qwen3.5 or Qwen3-Next. Write head.kind: mtp: this family's releases have an MTP head."
            )
        return replace(
            trunk,
            kind=kind,
            title=f"{kind.title} for {trunk.title}",
            declaration=Declaration(count=None),
            keys=replace(
                trunk.keys, head_prefixes=self.prefixes, rules=self.rules, shared={}, num_sublayers=lambda config: 1
            ),
            wiring=replace(self.wiring, conventions=dict.fromkeys(_SERVERS, self.wiring.default)),
            layer=self.layer,
            engines=self.engines(trunk.wrapper or trunk.name),
        )

    def described(self, family: Family, config: RawConfig) -> Family:
        if not self.format.has_layer:
            return family
        fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        layer = replace(family.classes, config=lambda text_config, num_modules: LlamaConfig.from_dict(fields))
        return replace(family, layer=layer)


_BEYOND_ATTACHED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose releases have an MTP head, and whose trunks may get a head of another kind too."""


def draft_kind(config: RawConfig) -> HeadKind | None:
    """Return the kind of head of a draft model's raw ``config.json``, or None if it is not a draft model's."""
    return next((kind for kind in head_kinds() if kind.has_file and kind.load_parts().format.describes(config)), None)


def serves_draft_vocab(kind: str) -> bool:
    """Return whether engines draft from the draft vocabulary of a head of this kind, and not from all tokens."""
    stored = find_head_kind(kind).load_parts().format
    return stored is not None and stored.draft_vocab


def of_kind(family: Family, kind: str, config: RawConfig | None = None) -> Family:
    """Return the record of ``family``'s trunk with a head of ``kind``; for ``mtp`` the family's own record.

    ``config`` is that of a draft model, whose layer the record then describes.

    Raises:
        KeyError: There is no such kind.
        UnsupportedModelError: Heads of it are not supported for the family's trunks.
    """
    found = find_head_kind(kind)
    parts = found.load_parts()
    on_trunk = parts.on(family, found)
    return on_trunk if config is None else parts.described(on_trunk, config)


def kinds_served(family: Family) -> dict[str, tuple[str, ...]]:
    """Return the kinds of new heads that a trunk can be given, each with the engines that draft with it."""
    found = {}
    for kind in head_kinds():
        if "random" in kind.starts:
            with contextlib.suppress(UnsupportedModelError):
                engines = of_kind(family, kind.name).serving.items()
                found[kind.name] = tuple(engine for engine, one in engines if one.supported)
    return found


def most_served_kind(family: Family) -> str:
    """Return the kind that most servers draft with on this trunk; of equals, the first in the table of kinds.

    Raises:
        UnsupportedModelError: The trunk can be given no new head.
    """
    family.require_layer()
    served = kinds_served(family)
    return max(served, key=lambda kind: len({*served[kind]} & {*_SERVERS}))
