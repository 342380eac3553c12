"""Acceptance figures against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_train.acceptance.counts import (
    accept_greedy,
    entropy,
    overlap,
    repeated_ngram_share,
)


def test_repeated_ngrams_count_within_one_output_only() -> None:
    assert repeated_ngram_share([[1, 2, 3, 1, 2, 3]], n=3) == pytest.approx(1 / 4)
    assert repeated_ngram_share([[1, 2, 3], [1, 2, 3]], n=3) == 0.0
    assert repeated_ngram_share([[7] * 10], n=8) == pytest.approx(2 / 3)
    assert repeated_ngram_share([[1, 2, 3]], n=8) is None


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([5, 7, 9], [5, 7, 9, 4], 3),
        ([5, 7, 9], [5, 7, 2, 4], 2),
        ([5, 7, 9], [1, 7, 9, 4], 0),  # a later match does not count
        ([5, 7, 9], [9, 5, 7, 9], 0),  # off by one
        ([], [4], 0),
    ],
)
def test_accept_greedy_counts_the_longest_matching_prefix(draft: list[int], target: list[int], expected: int) -> None:
    accepted = accept_greedy(torch.tensor(draft, dtype=torch.long), torch.tensor(target))
    assert accepted.shape == ()
    assert int(accepted) == expected


def test_accept_greedy_takes_rows() -> None:
    draft_BK = torch.tensor([[5, 7], [5, 7]])
    target_BK1 = torch.tensor([[5, 7, 1], [5, 1, 7]])
    assert accept_greedy(draft_BK, target_BK1).tolist() == [2, 1]


def test_overlap_is_the_acceptance_of_rejection_sampling() -> None:
    p_NV = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    q_NV = torch.tensor([[0.25, 0.25, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    assert overlap(p_NV, q_NV).tolist() == pytest.approx([0.5, 0.0, 1.0])


def test_entropy_is_in_nats_and_survives_zeros() -> None:
    p_NV = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert entropy(p_NV).tolist() == pytest.approx([math.log(4), 0.0])
