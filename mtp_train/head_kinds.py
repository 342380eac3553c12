"""The kinds of heads that ``head.kind`` can name: one line each, without importing torch.

The recipe validates names against this table. An MTP head is built from its family's own record. Every other kind is a
draft model beside its trunk, described by one ``mtp_train.families.drafts.record.DraftParts`` in a file of its own.

EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), Medusa (arXiv:2401.10774).
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_train.errors import UnsupportedModelError


@dataclass(frozen=True)
class HeadKind:
    """A kind of head.

    Attributes:
        name: The value of ``head.kind``.
        title: The name that tables and messages print.
        draft_parts: Where the parts of a draft model are, imported at first use. None for an MTP head.
        parallel: Whether every depth has a module of its own, without attention, that reads the trunk's state alone.
    """

    name: str
    title: str
    draft_parts: str | None
    parallel: bool = False


_KINDS = {
    kind.name: kind
    for kind in (
        HeadKind("mtp", "MTP", None),
        HeadKind("eagle", "EAGLE", "mtp_train.families.drafts.eagle:EAGLE"),
        HeadKind("eagle3", "EAGLE-3", "mtp_train.families.drafts.eagle:EAGLE3"),
        HeadKind("medusa", "Medusa", "mtp_train.families.drafts.medusa:MEDUSA", parallel=True),
    )
}


def head_kind_names() -> tuple[str, ...]:
    """Return the names of all kinds, ``mtp`` first."""
    return tuple(_KINDS)


def draft_kinds() -> tuple[HeadKind, ...]:
    """Return all kinds that are draft models beside their trunk."""
    return tuple(kind for kind in _KINDS.values() if kind.draft_parts is not None)


def find_head_kind(name: str) -> HeadKind:
    """Return a kind by its name.

    Raises:
        UnsupportedModelError: There is no such kind.
    """
    found = _KINDS.get(name)
    if found is None:
        raise UnsupportedModelError(f"head.kind: {name!r}; expected one of {', '.join(_KINDS)}. Write one of these.")
    return found
