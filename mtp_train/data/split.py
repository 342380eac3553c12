"""Split items into a training side and a held-out side by group, and mix sources by weight.

Whether a group is held out depends on its name and the seed alone, so records, documents and prompts of one group are
always on the same side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from mtp_train.data.records import Record
from mtp_train.errors import DataError


class Grouped(Protocol):
    """An item with a group: a record, a document or a prompt."""

    @property
    def group(self) -> str:
        """Name of the item's group; groups are held out as a whole."""
        ...


GroupedT = TypeVar("GroupedT", bound=Grouped)


def stable_share(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on ``text`` and ``seed`` alone (unlike ``hash``, also between runs)."""
    digest = hashlib.sha256(f"{seed}:{text}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def is_held_out(group: str, holdout: float, seed: int) -> bool:
    """Return whether a group is held out.

    The result depends on the arguments alone, also when items were dropped or more data was added.
    """
    return stable_share(group, seed) < holdout


def split_by_group(
    items: Sequence[GroupedT], holdout: float, seed: int, field: str = "data.holdout"
) -> tuple[list[GroupedT], list[GroupedT]]:
    """Split items into items to train on and held-out items.

    Args:
        items: Records, documents or prompts.
        holdout: Expected share of the groups that is held out, between 0 and 1.
        seed: Another seed holds out other groups.
        field: The recipe field of ``holdout``, for the error.

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


def mix(sources: Sequence[Sequence[Record]], weights: Sequence[float], seed: int) -> list[Record]:
    """Return records of all sources in the order of the sources, their numbers in proportion to the weights.

    At least one source is taken whole. From the others, records are chosen by their ids and the seed alone.

    Args:
        sources: The records of each source.
        weights: One weight above 0 per source.
        seed: Another seed chooses other records.

    Raises:
        DataError: A source's share is less than one record.
    """
    unit = min(len(records) / weight for records, weight in zip(sources, weights, strict=True))
    mixed: list[Record] = []
    for number, (records, weight) in enumerate(zip(sources, weights, strict=True)):
        wanted = int(unit * weight + 1e-6)
        if wanted == 0:
            raise DataError(
                f"data.sources.{number}.weight: {weight} leaves none of its {len(records)} records, as another source "
                "has too few records for its weight; expected one or more. Raise it, or lower the other weight."
            )
        ranked = sorted(records, key=lambda record: (stable_share(record.id, seed), record.id))
        chosen = {record.id for record in ranked[:wanted]}
        mixed += [record for record in records if record.id in chosen]
    return mixed
