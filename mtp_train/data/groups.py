"""Join groups of records whose prompts are near-duplicates: they are held out together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mtp_train.data.near import near_duplicate_groups
from mtp_train.data.records import Record, grouping_text, text_group


def join_near_duplicates(records: Sequence[Record], on_group: Callable[[int], None] | None = None) -> list[Record]:
    """Return the records, those with near-duplicate prompts in one group.

    A group that is not made from a record's content (a file, a value of the group field) stays as it is. The order of
    the records has no influence.

    Args:
        records: Those of all sources.
        on_group: Told how many groups were looked at since it was last called.
    """
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for record in records:
        if record.group not in seen:
            seen.add(record.group)
            text = grouping_text(record.content)
            if record.group == text_group(text):
                texts[record.group] = text
    # By digest: in no order that the records have.
    groups = sorted(texts)
    found = near_duplicate_groups([texts[group] for group in groups], on_group)
    other = {group: groups[first] for group, first in zip(groups, found, strict=True) if group != groups[first]}
    return [replace(record, group=other[record.group]) if record.group in other else record for record in records]
