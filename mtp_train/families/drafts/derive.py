"""Records of heads of other kinds than ``mtp``, derived from the record of their trunk's family."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.drafts.record import parts_of
from mtp_train.families.engines import EngineSupport, complete
from mtp_train.families.spec import Declaration, Family, RawConfig, Wiring
from mtp_train.head_kinds import HeadKind, draft_kinds, find_head_kind, head_kind_names

_BEYOND_ATTACHED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose releases have an MTP head, and whose trunks may get a head of another kind too."""

_SERVERS = ("vllm", "sglang", "llama.cpp")
"""Engines that count in the choice of a kind: transformers decodes one request at a time."""


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
        kind: Its name.
        trunk: The family's name, or the wrapper's model type for a trunk inside of a vision-language model.
    """
    return complete(parts_of(find_head_kind(kind)).serving(trunk))


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
            family.keys, head_prefixes=parts.prefixes, rules=parts.rules, shared=(), num_sublayers=lambda config: 1
        ),
        wiring=Wiring(
            final_norm=parts.final_norm,
            trunk_layers=parts.trunk_layers,
            default=parts.convention,
            conventions={"vllm": parts.convention, "sglang": parts.convention, "llama.cpp": parts.convention},
        ),
        layer=parts.layer,
        engines=draft_engines(kind, family.wrapper or family.name),
    )


def require_served_trunk(kind: str, text_config: RawConfig, *, where: str) -> None:
    """Check that engines give a head of this kind the inputs that it was trained with on this trunk.

    Raises:
        UnsupportedModelError: They do not.
    """
    found = find_head_kind(kind)
    reason = None if found.draft_parts is None else parts_of(found).unserved_trunk(text_config)
    if reason is not None:
        raise UnsupportedModelError(f"{where}: {reason}. Attach a head of another kind.")


def kinds_served(family: Family, text_config: RawConfig) -> dict[str, tuple[str, ...]]:
    """Return the kinds of heads that a trunk can be given, each with the engines that draft with it."""
    found = {}
    for kind in head_kind_names():
        with contextlib.suppress(UnsupportedModelError):
            support = of_kind(family, kind).serving
            require_served_trunk(kind, text_config, where=family.title)
            found[kind] = tuple(engine for engine, one in support.items() if one.supported)
    return found


def most_served_kind(family: Family, text_config: RawConfig) -> str:
    """Return ``eagle3`` if more servers draft with it on this trunk than with an MTP head, else ``mtp``.

    The other kinds accept less (Medusa), or are served by a part of the servers that EAGLE-3 is.
    """
    served = kinds_served(family, text_config)
    # The first of equals.
    return max(("mtp", "eagle3"), key=lambda kind: len({*served.get(kind, ())} & {*_SERVERS}))
