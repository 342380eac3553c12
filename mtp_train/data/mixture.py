"""Mix sources by weight: as much of each as there can be without taking a record twice."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_train.data.records import Record
from mtp_train.data.split import stable_share
from mtp_train.errors import DataError


def mix(sources: Sequence[Sequence[Record]], weights: Sequence[float], seed: int) -> list[Record]:
    """Return records of every source, their numbers in the proportion of the weights, in the order of the sources.

    One source is taken whole. Of the others the records are chosen by their ids and the seed alone.

    Args:
        sources: The records of each.
        weights: One for each source, above 0.
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
                "has so few for its weight; expected one or more. Raise it, or lower the other's."
            )
        ranked = sorted(records, key=lambda record: (stable_share(record.id, seed), record.id))
        chosen = {record.id for record in ranked[:wanted]}
        mixed += [record for record in records if record.id in chosen]
    return mixed
