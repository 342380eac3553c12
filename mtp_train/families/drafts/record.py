"""Heads of other kinds than ``mtp``, stored as draft models: their parts, and their records for the trunk of a family.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import EngineSupport, complete
from mtp_train.families.spec import Declaration, Family, HeadLayer, KeyRule, RawConfig, Wiring
from mtp_train.head_kinds import HeadKind, draft_kinds, find_head_kind, head_kind_names


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


@dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """How a draft model is stored: its ``config.json``, and its tensors beside the head's own."""

    written_as: tuple[str, ...]
    """Values of ``architectures`` in the draft models that are written for engines. An engine uses the first that it
    supports."""
    read_as: tuple[str, ...] = ()
    """Further values that third parties write."""
    config: Callable[[PretrainedConfig, int, RawConfig, int | None], dict[str, Any]]
    """The layers' config, the number of modules, the trunk's raw text config and the number of tokens that may be
    drafted (None for all) to the ``config.json`` for engines, without architectures, dtype and vocab_size."""
    modules_field: str | None = None
    """Field with the number of modules. None: there is one module."""
    drafted_field: str | None = None
    """Field with the number of rows of the draft model's output matrix; the vocabulary where the field is missing."""
    has_output: bool = True
    """Whether the draft model contains an output matrix. If not, engines use the trunk's lm_head."""
    draft_vocab: bool = False
    """Whether engines read a list of the tokens that may be drafted."""
    plain_settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that change the forward, and the values with which it is the one implemented here, the usual first."""
    zeros: tuple[str, ...] = ()
    """Keys of vectors (D) of zeros that are written because an engine has random values where the file has none."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensor keys as the speculators package writes them, to the same prefixes in ``DraftParts.rules``."""


@dataclass(frozen=True, kw_only=True)
class DraftParts:
    """The parts of a head's record that depend on the kind of head, and not on the trunk.

    The head shares the trunk's embedding and lm_head, which stay frozen.
    """

    prefixes: tuple[str, ...]
    """Every key of the draft model under one of these belongs to the head."""
    rules: tuple[KeyRule, ...]
    """The key map of the draft model."""
    module: Callable[[Family, PretrainedConfig, int], Block]
    """The family's record, the config of the head's layers and the number of the module to the module."""
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
    format: DraftFormat


def described_by(family: Family, config: Mapping[str, Any]) -> Family:
    """Return the family record of a head with the layer that the config of a draft model describes."""
    if find_head_kind(family.kind).parallel:
        return family
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    layer = replace(family.classes, config=lambda text_config, num_modules: LlamaConfig.from_dict(fields))
    return replace(family, layer=layer)


def parts_of(kind: HeadKind) -> DraftParts:
    """Return the parts of a kind that is a draft model."""
    return pkgutil.resolve_name(str(kind.draft_parts))


_BEYOND_ATTACHED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose releases have an MTP head, and whose trunks may get a head of another kind too."""

_SERVERS = ("vllm", "sglang", "llama.cpp")
"""Engines that serve draft models and count in the choice of a kind: transformers decodes one request at a time."""


def draft_kind(config: RawConfig) -> HeadKind | None:
    """Return the kind of head of a draft model's raw ``config.json``, or None if it is not a draft model's."""
    names = config.get("architectures") or []
    for kind in draft_kinds():
        stored = parts_of(kind).format
        if any(name in (*stored.written_as, *stored.read_as) for name in names):
            return kind
        # Releases of EAGLE-3's authors declare their trunk's class; no trunk has a draft vocabulary.
        if names == ["LlamaForCausalLM"] and stored.drafted_field is not None and config.get(stored.drafted_field):
            return kind
    return None


def draft_engines(kind: str, trunk: str) -> Mapping[str, EngineSupport]:
    """Return the engines' table of a head of this kind.

    Args:
        trunk: The family's name, or the wrapper's model type for a trunk inside of a vision-language model.
    """
    parts = parts_of(find_head_kind(kind))
    served = {engine: one if trunk in trunks else parts.other_trunks for engine, (one, trunks) in parts.serving.items()}
    return complete({**dict.fromkeys((*_SERVERS, "transformers"), parts.other_engines), **served})


def serves_draft_vocab(kind: str) -> bool:
    """Return whether engines draft from the draft vocabulary of a head of this kind, and not from all tokens."""
    found = find_head_kind(kind)
    return found.draft_parts is not None and parts_of(found).format.draft_vocab


def of_kind(family: Family, kind: str) -> Family:
    """Return the record of ``family``'s trunk with a head of ``kind``; for ``mtp`` the family's own record.

    Raises:
        UnsupportedModelError: There is no such kind, or heads of it are not supported for the family's trunks.
    """
    found = find_head_kind(kind)
    if found.draft_parts is None:
        return family
    if not (family.attached or family.name in _BEYOND_ATTACHED):
        raise UnsupportedModelError(
            f"head.kind: {kind} for a trunk of {family.title}; expected a family whose releases carry no head, or "
            "Qwen3.5 or Qwen3-Next. Write head.kind: mtp: this family's releases have an MTP head."
        )
    parts = parts_of(found)
    return replace(
        family,
        kind=kind,
        title=f"{found.title} for {family.title}",
        declaration=Declaration(count=None),
        keys=replace(
            family.keys, head_prefixes=parts.prefixes, rules=parts.rules, shared={}, num_sublayers=lambda config: 1
        ),
        wiring=replace(parts.wiring, conventions=dict.fromkeys(_SERVERS, parts.wiring.default)),
        layer=parts.layer,
        engines=draft_engines(kind, family.wrapper or family.name),
    )


def kinds_served(family: Family) -> dict[str, tuple[str, ...]]:
    """Return the kinds of heads that a trunk can be given, each with the engines that draft with it."""
    found = {}
    for kind in head_kind_names():
        with contextlib.suppress(UnsupportedModelError):
            support = of_kind(family, kind).serving
            found[kind] = tuple(engine for engine, one in support.items() if one.supported)
    return found


def most_served_kind(family: Family) -> str:
    """Return ``eagle3`` if more servers draft with it on this trunk than with an MTP head, else ``mtp``.

    The other kinds accept less (Medusa), or are served by a part of the servers that EAGLE-3 is.
    """
    served = kinds_served(family)
    # The first of equals.
    return max(("mtp", "eagle3"), key=lambda kind: len({*served.get(kind, ())} & {*_SERVERS}))
