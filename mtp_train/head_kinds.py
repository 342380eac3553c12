"""The table of the kinds of heads that ``head.kind`` can name, without importing torch.

The recipe validates names against it. A kind is one file in ``mtp_train/families/kinds/``, or another package's
(:func:`register_kind`), with its :class:`~mtp_train.families.kinds.kind.KindParts`.

EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), Medusa (arXiv:2401.10774), DFlash (arXiv:2602.06036) and the
block drafters that follow it, DFlash 2 and DSpark; the assistant is Gemma 4's.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

DEEPEST = 7
"""Largest number of drafts a round, unless a kind has its own."""
SUGGESTED_DEPTH = 3
"""Drafts a round of printed commands, where nothing is known of a head's acceptance."""


@dataclass(frozen=True)
class HeadKind:
    """A kind of head.

    Attributes:
        name: The value of ``head.kind``.
        title: The name that tables and messages print.
        parts: ``module:name`` of its parts, imported at first use.
        drafting: ``module:name`` of the function from a head, and the tokens that it may draft (int, shape (R,); None
            for all), to the decoder's ``Drafting``.
        has_file: Whether the head is stored in a checkpoint of its own, a draft model, and not in its trunk's.
        starts: The values of ``head.init`` that it can start from; empty if it is decoded with, and not trained.
        has_output: Whether it always has an output matrix of its own, so that no draft vocabulary can be chosen for it.
        apart: Whether its depths can be trained independently (``objective.unroll: fastmtp``).
        parallel: Whether every depth has a module of its own, without attention, that reads the trunk's state alone.
        deepest: Largest number of drafts a round.
    """

    name: str
    title: str
    parts: str
    drafting: str = "mtp_inference.drafters.head_drafter:HeadDrafting"
    has_file: bool = True
    starts: tuple[str, ...] = ("random", "graft")
    has_output: bool = False
    apart: bool = True
    parallel: bool = False
    deepest: int = DEEPEST

    def load_parts(self) -> Any:
        """Return the :class:`~mtp_train.families.kinds.kind.KindParts`."""
        return pkgutil.resolve_name(self.parts)

    def make_head(self, *shape: Any, **wiring: Any) -> Any:
        """Return the head, untrained; the arguments are those of ``MtpHead``."""
        return pkgutil.resolve_name(self.load_parts().head)(*shape, **wiring)

    def draft_with(self, head: Any, draft_vocab_R: Any) -> Any:
        """Return the decoder's ``Drafting`` with a head."""
        return pkgutil.resolve_name(self.drafting)(head, draft_vocab_R)


_PARTS = "mtp_train.families.kinds"
MTP = HeadKind(
    "mtp", "MTP", f"{_PARTS}.mtp:MTP", has_file=False, starts=("native", "graft", "copy_last_layer", "random")
)
_BLOCKS = "mtp_inference.drafters.block_drafter:BlockDrafting"
DSPARK_INSIDE = replace(
    MTP, title="DSpark", parts=f"{_PARTS}.dspark_inside:PARTS", drafting=_BLOCKS, starts=(), deepest=16
)
"""A drafter that takes the place of the MTP head in its trunk's checkpoint. Its family selects it, and no recipe."""
_KINDS = {
    kind.name: kind
    for kind in (
        MTP,
        HeadKind("eagle3", "EAGLE-3", f"{_PARTS}.eagle3:EAGLE3"),
        HeadKind("eagle", "EAGLE", f"{_PARTS}.eagle:EAGLE"),
        HeadKind("medusa", "Medusa", f"{_PARTS}.medusa:MEDUSA", apart=False, parallel=True),
        HeadKind(
            "assistant",
            "Gemma 4 assistant",
            f"{_PARTS}.assistant:ASSISTANT",
            drafting="mtp_inference.drafters.assistant_drafter:AssistantDrafting",
            starts=("graft",),
            has_output=True,
            apart=False,
        ),
        *(
            HeadKind(
                name,
                title,
                f"{_PARTS}.{name}:{name.upper()}",
                drafting=_BLOCKS,
                starts=(),
                apart=False,
                deepest=16,
            )
            for name, title in (("dflash", "DFlash"), ("dflash2", "DFlash 2"), ("dspark", "DSpark"))
        ),
    )
}


def register_kind(kind: HeadKind) -> None:
    """Add a kind of head, before the recipe that names it is read."""
    _KINDS[kind.name] = kind


def head_kinds() -> Iterator[HeadKind]:
    """Return all kinds, ``mtp`` first."""
    return iter(_KINDS.values())


def head_kind_names() -> tuple[str, ...]:
    return tuple(_KINDS)


def find_head_kind(name: str) -> HeadKind:
    """Return the kind with this name; raise a KeyError if there is none."""
    return _KINDS[name]
