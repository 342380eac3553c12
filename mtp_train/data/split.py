"""Hold out whole groups, the same ones wherever the question is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from mtp_train.errors import DataError


class Grouped(Protocol):
    """Anything with a group: records, documents, prompts."""

    @property
    def group(self) -> str:
        """The group it is held out with."""
        ...


GroupedT = TypeVar("GroupedT", bound=Grouped)


def stable_share(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on ``text`` and ``seed`` alone (unlike ``hash``, also between runs)."""
    digest = hashlib.sha256(f"{seed}:{text}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def is_held_out(group: str, holdout: float, seed: int) -> bool:
    """Say whether a group is held out.

    It depends on nothing but the arguments: records, documents and prompts of one group always fall on one side, also
    when some of them were dropped on the way or more data came in.
    """
    return stable_share(group, seed) < holdout


def split_by_group(
    items: Sequence[GroupedT], holdout: float, seed: int, field: str = "data.holdout"
) -> tuple[list[GroupedT], list[GroupedT]]:
    """Part items into those to train on and those held out.

    Args:
        items: Records, documents or prompts.
        holdout: Expected share of the groups held out, between 0 and 1.
        seed: Another seed holds out other groups.
        field: The recipe's, for the error.

    Raises:
        DataError: All items are in one group, or one of the sides is empty.
    """
    if len({item.group for item in items}) == 1:
        raise DataError(
            f"{field}: {len(items)} records in one group ({items[0].group}), which cannot be on both sides; expected "
            "at least two groups. Add data. A .txt file is one group: cut it into several files, read as a directory "
            "or a glob, or write its documents as the lines of a .jsonl. Near-duplicate prompts are one group, and so "
            "are chats with the same first user turn: name the column to group by in data.group_field."
        )
    train = [item for item in items if not is_held_out(item.group, holdout, seed)]
    held_out = [item for item in items if is_held_out(item.group, holdout, seed)]
    if not train or not held_out:
        num_groups = len({item.group for item in items})
        side = "train" if not train else "held-out"
        raise DataError(
            f"{field}: {holdout} leaves the {side} side empty ({len(items)} records in {num_groups} groups); "
            f"expected records on both sides. Add data, change {field} or seed, or group by another field "
            "(data.group_field)."
        )
    return train, held_out
