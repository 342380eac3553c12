"""The alignment table, row by row. Row: documents A B C D E and P Q R, then two places of padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_train.heads.alignment import (
    PADDING_DOCUMENT,
    input_tokens,
    prefix_mask,
    unroll_mask,
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
    mask_BTT = prefix_mask(row([0, 0, 0, 1, 1, PADDING_DOCUMENT]))
    assert seen(mask_BTT[0]) == ["x.....", "xx....", "xxx...", "...x..", "...xx.", ".....x"]


def test_a_depth_sees_the_true_prefix_and_then_its_own_rows_only() -> None:
    prefix_BTT = prefix_mask(row([0, 0, 0, 1]))
    assert seen(unroll_mask(prefix_BTT, 1)[0]) == ["x...", "xx..", "xxx.", "...x"]
    assert seen(unroll_mask(prefix_BTT, 3)[0]) == ["x...x...x...", "xx...x...x..", "xxx...x...x.", "...x...x...x"]


def test_a_sliding_window_counts_positions_and_not_rows() -> None:
    """Depth k of start t stands at t + k - 1: with a window of 2 depth 2 sees the last true row, depth 3 no more."""
    prefix_BTT = prefix_mask(torch.zeros(1, 3, dtype=torch.long))
    assert seen(unroll_mask(prefix_BTT, 1, 2)[0]) == ["x..", "xx.", ".xx"]
    assert seen(unroll_mask(prefix_BTT, 2, 2)[0]) == ["x..x..", ".x..x.", "..x..x"]
    assert seen(unroll_mask(prefix_BTT, 3, 2)[0]) == ["...x..x..", "....x..x.", ".....x..x"]
    assert torch.equal(unroll_mask(prefix_BTT, 3, 9), unroll_mask(prefix_BTT, 3))
