"""The alignment table, row by row. Row: documents A B C D E and P Q R, then two places of padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_train.heads.alignment import (
    PADDING_DOCUMENT,
    UnrollMask,
    input_tokens,
    valid_targets,
)

TOKENS = [11, 12, 13, 14, 15, 21, 22, 23, 0, 0]
DOCUMENT = [0, 0, 0, 0, 0, 1, 1, 1, PADDING_DOCUMENT, PADDING_DOCUMENT]


def row(values: list[int]) -> Tensor:
    return torch.tensor([values])


def flags(text: str) -> list[bool]:
    return [letter == "x" for letter in text]


def seen(mask_QS: Tensor) -> list[str]:
    """Return a mask as text, one line a query."""
    return ["".join("x" if value else "." for value in line) for line in mask_QS.tolist()]


@pytest.mark.parametrize(
    ("depth", "read"),
    [(1, [12, 13, 14, 15, 21, 22, 23, 0, 0, 0]), (3, [14, 15, 21, 22, 23, 0, 0, 0, 0, 0])],
)
def test_depth_k_reads_k_ahead(depth: int, read: list[int]) -> None:
    assert input_tokens(row(TOKENS), depth).tolist() == [read]


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(1, "xxx..x...."), (2, "xx........"), (3, "x........."), (4, ".........."), (9, "..........")],
)
def test_a_target_lies_in_its_starts_document(depth: int, expected: str) -> None:
    everything_BT = torch.ones(1, len(DOCUMENT), dtype=torch.bool)
    assert valid_targets(row(DOCUMENT), everything_BT, depth).tolist() == [flags(expected)]


def test_the_mask_speaks_of_the_target_not_of_the_start() -> None:
    mask_BT = torch.tensor([flags("..x.x..x..")])
    assert valid_targets(row(DOCUMENT), mask_BT, 1).tolist() == [flags("x.x..x....")]
    assert valid_targets(row(DOCUMENT), mask_BT, 2).tolist() == [flags(".x........")]


def test_a_prefix_ends_at_the_documents_border() -> None:
    mask_BTT = UnrollMask(row([0, 0, 0, 1, 1, PADDING_DOCUMENT]), 1).whole()
    assert seen(mask_BTT[0]) == ["x.....", "xx....", "xxx...", "...x..", "...xx.", ".....x"]


def test_a_depth_sees_the_true_prefix_and_then_its_own_rows_only() -> None:
    document_BT = row([0, 0, 0, 1])
    assert seen(UnrollMask(document_BT, 1).whole()[0]) == ["x...", "xx..", "xxx.", "...x"]
    assert seen(UnrollMask(document_BT, 3).whole()[0]) == [
        "x...x...x...",
        "xx...x...x..",
        "xxx...x...x.",
        "...x...x...x",
    ]


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, ["x..", "xx.", ".xx"]),
        (2, ["x..x..", ".x..x.", "..x..x"]),
        (3, ["...x..x..", "....x..x.", ".....x..x"]),
    ],
)
def test_a_sliding_window_counts_positions_and_not_rows(depth: int, expected: list[str]) -> None:
    """Depth k of start t stands at t + k - 1: with a window of 2 depth 2 sees the last true row, depth 3 no more."""
    document_BT = torch.zeros(1, 3, dtype=torch.long)
    assert seen(UnrollMask(document_BT, depth, 2).whole()[0]) == expected
    assert torch.equal(UnrollMask(document_BT, depth, 9).whole(), UnrollMask(document_BT, depth).whole())


@pytest.mark.parametrize("starts", [None, [1, 1, 4, 5, 7, 8, 9]])
@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_queries_of_a_block_attend_to_no_key_outside_of_it(
    depth: int, window: int | None, starts: list[int] | None
) -> None:
    """The keys of a block are some of the depth-1 rows, and its own rows of each later depth."""
    mask = UnrollMask(row(DOCUMENT), depth, window, None if starts is None else torch.tensor([starts]))
    size = len(starts or DOCUMENT)
    whole_QS = mask.whole()[0]
    for start, end in ((0, 3), (3, size - 2), (size - 2, size)):
        first, last = mask.keys_of(start, end)
        later = (len(DOCUMENT) + own * size + key for own in range(depth - 1) for key in range(start, end))
        keys = [*range(first, last), *later]
        expected_QS = whole_QS[start:end]
        assert torch.equal(mask.of(start, end, first, last)[0], expected_QS[:, keys])
        assert expected_QS.sum() == expected_QS[:, keys].sum()
    assert UnrollMask(row(DOCUMENT), 1).keys_of(6, 8) == (5, 8)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_queries_of_some_starts_attend_as_they_do_among_all(depth: int, window: int | None) -> None:
    starts = [0, 3, 6, 9]
    size = len(DOCUMENT)
    some_QS = UnrollMask(row(DOCUMENT), depth, window, torch.tensor([starts])).whole()[0]
    keys = [*range(size), *(own * size + start for own in range(1, depth) for start in starts)]
    all_TS = UnrollMask(row(DOCUMENT), depth, window).whole()[0]
    assert torch.equal(some_QS, all_TS[starts][:, keys])
    assert not torch.equal(some_QS, all_TS[[0, 3, 5, 9]][:, keys])
