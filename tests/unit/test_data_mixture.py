from __future__ import annotations

from collections import Counter

import pytest

from mtp_train.data.groups import mix
from mtp_train.data.records import PlainText, Record
from mtp_train.errors import DataError


def source(name: str, size: int) -> list[Record]:
    return [Record(f"{name}#{number}", "g", PlainText(str(number))) for number in range(1, size + 1)]


def names(records: list[Record]) -> Counter[str]:
    return Counter(record.id.partition("#")[0] for record in records)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 1), {"a": 10, "b": 10, "c": 10}),
        ((3, 0.6, 0.3), {"a": 100, "b": 20, "c": 10}),
        ((1, 9, 0.1), {"a": 11, "b": 100, "c": 1}),
    ],
)
def test_a_mixture_is_as_large_as_can_be(weights: tuple[float, ...], expected: dict[str, int]) -> None:
    assert names(mix([source("a", 100), source("b", 100), source("c", 10)], weights, seed=0)) == expected


def test_what_is_mixed_depends_on_the_seed_alone() -> None:
    sources = [source("a", 100), source("b", 10)]
    mixed = mix(sources, (1, 1), seed=0)
    assert mixed == mix(sources, (2, 2), seed=0)
    assert mixed != mix(sources, (1, 1), seed=1)
    assert len({record.id for record in mixed}) == 20
    assert [record for record in sources[0] if record in mixed] == mixed[:10]
    assert mixed[10:] == sources[1]
    # Chosen all over the source, and kept by a mixture that takes more of it.
    assert mixed[:10] != sources[0][:10]
    assert set(mixed[:10]) < set(mix(sources, (2, 1), seed=0))


def test_a_source_that_would_give_nothing_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.sources\.1\.weight: 0\.001 leaves none of its 100 records.*Raise it"):
        mix([source("a", 100), source("b", 100)], (1, 0.001), seed=0)
